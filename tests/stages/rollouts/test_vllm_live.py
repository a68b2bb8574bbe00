"""Real vLLM on a tiny policy: what it samples, which weights it has, and what it survives. One worker serves all tests;
those that end it come last."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError, StageFailed
from stages.artifacts.store import open_store
from stages.policy.sequences import plain_sequences
from stages.policy.trainer.forward import logprobs_of, row_of, sampled_logits
from stages.policy.trainer.model import load_model
from stages.rollouts.chat_template import chat_template_in
from stages.rollouts.engines import close_engines
from stages.rollouts.engines.base import EngineFault, GenerationRequest, SamplingParams
from stages.rollouts.engines.stopping import n_until_stop
from stages.rollouts.engines.vllm import VllmEngine
from stages.rollouts.workers.command import slots
from stages.rollouts.workers.settings import VllmExecution
from tests.stages.rollouts.live import (
    CONFIG,
    CONTEXT,
    SMALL,
    ask,
    end,
    family_of,
    ids_of,
    prompts,
    url_of,
    worker_of,
)  # fmt: skip
from tests.stages.rollouts.policies import make_adapter, make_policy
from tests.stages.rollouts.processes import descendants, eventually, is_free, is_running, name_of
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PLAIN = SamplingParams(max_tokens=20, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def policy(live_policy):
    return live_policy


@pytest.fixture(scope="module")
def other_policy(tmp_path_factory):
    """Same architecture, other weights."""
    return make_policy(tmp_path_factory.mktemp("other"), seed=1, max_position_embeddings=CONTEXT)


def trained_logprobs(folder, requests, generations):
    """Of the sampled tokens, by the forward pass with which the policy is trained."""
    ids = [
        [*request.prompt_ids.tolist(), *generation.response_ids.tolist()]
        for request, generation in zip(requests, generations, strict=True)
    ]
    model, found = load_model(folder, torch.float32, trained=False), []
    for start in range(0, len(ids), 16):
        some = slice(start, start + 16)
        row = row_of(plain_sequences(ids[some], [len(one.prompt_ids) for one in requests[some]]), torch.device("cpu"))
        with torch.no_grad():
            found.append(logprobs_of(sampled_logits(model, row), row).numpy())
    return np.concatenate(found)


def difference(policy, requests, generations):
    found = np.concatenate([generation.logprobs for generation in generations])
    return np.abs(found - trained_logprobs(policy.folder, requests, generations))


def test_the_worker_is_on_a_port_of_its_own_and_writes_a_log(live, taken_port):
    worker = worker_of(live)
    assert worker.server.place != f"127.0.0.1:{taken_port}"
    assert live.facts()["vllm_versions"] == [worker.version]
    assert worker.version[0].isdigit()
    assert worker._process is not None
    assert "reset prefix cache" in worker._process.log_file.read_text()
    assert live.context_length == CONTEXT


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ten_thousand_stored_logprobs_are_those_of_the_trainer(live, policy, temperature):
    sampling = SamplingParams(temperature=temperature, max_tokens=64)
    requests = [GenerationRequest(prompt, sampling, seed=n) for n, prompt in enumerate(prompts(160))]
    with live.serving(policy):
        generations = ask(live, requests)
    apart = difference(policy, requests, generations)
    assert len(apart) > 10_000
    assert apart.max() < 1e-4


def test_an_answer_ends_with_the_token_that_completes_a_stop_text(live, policy):
    text_of, stops = chat_template_in(policy.folder).decode, ("e", "12", "7#", "\n")
    plain = replace(PLAIN, max_tokens=60)
    asked = [np.array([*prompt, 70], dtype=np.int32) for prompt in prompts(12)]  # none ends inside a character
    requests = [GenerationRequest(prompt, plain, seed=n, text_of=text_of) for n, prompt in enumerate(asked)]
    with live.serving(policy):
        whole = ask(live, requests)
        stopped = ask(live, [replace(one, sampling=replace(plain, stop_texts=stops)) for one in requests])
    ends = [n_until_stop(generation.response_ids, stops, text_of) for generation in whole]
    assert ids_of(stopped) == [ids[:n] for ids, n in zip(ids_of(whole), ends, strict=True)]
    assert sum(n is not None for n in ends) > 3
    assert {one.finish_reason for one, n in zip(stopped, ends, strict=True) if n is not None} == {"stop"}
    assert difference(policy, requests, stopped).max() < 1e-4


def test_greedy_is_what_transformers_generates(live, policy):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy.folder)
    sampling = replace(PLAIN, temperature=0.0)
    requests = [GenerationRequest(prompt, sampling, seed=n) for n, prompt in enumerate(prompts(6))]
    with live.serving(policy):
        generations = ask(live, requests)
    for asked, generation in zip(requests, generations, strict=True):
        with torch.no_grad():
            theirs = model.generate(
                torch.from_numpy(asked.prompt_ids.astype(np.int64))[None],
                do_sample=False, max_new_tokens=20, eos_token_id=2,
            )[0, len(asked.prompt_ids) :]  # fmt: skip
        assert generation.response_ids.tolist() == theirs.tolist()


def test_a_seed_gives_the_same_sample_whatever_else_is_asked(live, policy):
    requests = [GenerationRequest(prompt, PLAIN, seed=n) for n, prompt in enumerate(prompts(40, seed=3))]
    with live.serving(policy):
        together = ids_of(ask(live, requests))
        some = ids_of(ask(live, requests[5:12]))
    assert some == together[5:12]


def test_attempts_at_one_prompt_share_its_computation_and_differ(live, policy):
    prompt = np.random.default_rng(1).integers(3, 300, size=200).astype(np.int32)
    requests = [GenerationRequest(prompt, replace(PLAIN, max_tokens=10), seed=n) for n in range(32)]
    with live.serving(policy):
        before = hits(live)
        found = ask(live, requests)
        assert hits(live) - before >= 20 * 128  # tokens; a block on the CPU has 128
    assert len({tuple(ids) for ids in ids_of(found)}) > 30
    assert difference(policy, requests, found).max() < 1e-4


def hits(engine):
    from stages.rollouts.workers.server import _sum

    text = engine._in_loop(worker_of(engine).server._ask("GET", "/metrics", None, 10)).result().decode()
    return _sum(text, "prefix_cache_hits_total")


def test_a_stop_token_ends_the_answer_and_is_kept(live, policy):
    prompt = prompts(1, seed=2)[0]
    with live.serving(policy):
        free = ask(live, [GenerationRequest(prompt, SamplingParams(max_tokens=20), seed=4)])[0]
        stop = int(free.response_ids[5])
        first = int(np.flatnonzero(free.response_ids == stop)[0])
        sampling = SamplingParams(max_tokens=20, stop_token_ids=(1, stop))
        stopped = ask(live, [GenerationRequest(prompt, sampling, seed=4)])[0]
    assert stopped.response_ids.tolist() == free.response_ids[: first + 1].tolist()
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")


def test_the_checkpoints_own_sampling_defaults_change_nothing(live, policy, tmp_path):
    import json

    folder = tmp_path / "policy"
    shutil.copytree(policy.folder, folder)
    defaults = {"eos_token_id": [2, 5], "temperature": 0.01, "top_k": 1, "repetition_penalty": 2.0}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    requests = [GenerationRequest(prompt, PLAIN, seed=n) for n, prompt in enumerate(prompts(8))]
    with live.serving(policy):
        plain = ids_of(ask(live, requests))
    with live.serving(replace(policy, policy_id="d" * 64, folder=folder)):
        assert ids_of(ask(live, requests)) == plain


def test_another_policy_is_put_into_the_running_worker_and_nothing_of_the_old_one_is_left(live, policy, other_policy):
    requests = [GenerationRequest(prompt, PLAIN, seed=n) for n, prompt in enumerate(prompts(12, longest=200))]
    process = worker_of(live)._process
    found = []
    for current in (policy, other_policy, policy):
        with live.serving(current):
            generations = ask(live, requests)
        assert {generation.policy_id for generation in generations} == {current.policy_id}
        assert difference(current, requests, generations).max() < 1e-4
        found.append(ids_of(generations))
    assert found[0] == found[2] != found[1]
    assert worker_of(live)._process is process


@pytest.fixture(scope="module")
def adapters(policy, tmp_path_factory):
    """Two adapters of ``policy``, and for each a checkpoint that it is merged into."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("adapter")
        adapter = make_adapter(policy, folder / "adapter", seed)
        assert adapter.adapter is not None
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(policy.folder), adapter.adapter)
        model.merge_and_unload().save_pretrained(folder / "merged")
        made.append((replace(adapter, digest=f"{seed:08d}"), replace(policy, folder=folder / "merged")))
    return made


def test_adapters_come_and_go_in_the_running_worker_and_its_logprobs_are_the_trainers(live, policy, adapters):
    requests = [GenerationRequest(prompt, PLAIN, seed=n) for n, prompt in enumerate(prompts(12, longest=200))]
    live.load(policy)
    process = worker_of(live)._process
    found = []
    (one, _), (two, _) = adapters
    for current, merged in [*adapters, (policy, policy), adapters[0]]:
        with live.serving(current):
            generations = ask(live, requests)
        assert {generation.policy_id for generation in generations} == {current.policy_id}
        assert difference(merged, requests, generations).max() < 1e-4
        found.append(ids_of(generations))
    assert found[0] == found[3]
    assert found[0] != found[1] != found[2] != found[0]
    assert worker_of(live)._process is process
    served = [model.name for model in live._in_loop(worker_of(live).server.models()).result()]
    assert one.adapter_name in served
    assert two.adapter_name not in served, "it was unloaded"


def test_an_adapter_on_the_wrong_base_does_not_serve(live, policy, other_policy, adapters):
    """Neither in a server of others, which is left as it is, nor in one of ours, with by how much it is off."""
    (adapter, _), (right, merged) = adapters
    live.load(other_policy)
    execution = VllmExecution(workers=[url_of(live)])
    attached = VllmEngine(CONFIG, execution, probe_tolerance=1e-4)
    try:
        with pytest.raises(StageFailed, match=r"off by up to \d.*\n.*left as it is"):
            attached.load(adapter)
        live.policy_id = None
        live.load(policy)
        with attached.serving(right):  # on the base that is there now
            requests = [GenerationRequest(prompt, PLAIN, seed=n) for n, prompt in enumerate(prompts(4))]
            assert difference(merged, requests, ask(attached, requests)).max() < 1e-4
    finally:
        attached.close()


def test_vllms_own_reload_on_the_cpu_keeps_a_tied_head_and_is_found_out(live, policy, other_policy):
    live.load(policy)
    execution = VllmExecution(workers=[url_of(live)], update="in_place")
    attached = VllmEngine(CONFIG, execution, probe_tolerance=1e-4)
    try:
        with pytest.raises(StageFailed, match=r"off by up to \d"):
            attached.load(other_policy)
    finally:
        attached.close()
    live.policy_id = None  # its weights were changed behind its back
    with live.serving(policy):
        requests = [GenerationRequest(prompt, PLAIN, seed=n) for n, prompt in enumerate(prompts(4))]
        assert difference(policy, requests, ask(live, requests)).max() < 1e-4


def test_a_given_worker_with_another_policy_is_refused_by_how_much(live, policy, other_policy):
    live.load(other_policy)
    execution = VllmExecution(workers=[url_of(live)])
    attached = VllmEngine(CONFIG, execution, probe_tolerance=1e-4)
    try:
        with pytest.raises(StageFailed, match=r"off by up to \d.*\n.*left as it is"):
            attached.load(policy)
        attached.load(other_policy)
    finally:
        attached.close()


def test_a_changed_chat_template_reaches_the_prompts_though_the_server_has_the_old_one(live, policy, tmp_path):
    live.load(policy)
    folder = tmp_path / "policy"
    shutil.copytree(policy.folder, folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("<|im_start|>system\nbe brief<|im_end|>\n" + template)
    store = open_store(tmp_path / "store")
    tasks = stored_tasks(store)
    execution = {"vllm": {"workers": [url_of(live)]}, "probe_tolerance": 1e-4}
    found = []
    for one in (policy, replace(policy, folder=folder)):
        stored = stored_policy(store, one)
        manifest = rolled_out(store, request(tasks, stored, {"n": 2, "engine": {"type": "vllm"}}, execution)).manifest
        steps = frame(store, manifest, "steps").join(frame(store, manifest, "episodes"), on="episode_id")
        opening = chat_template_in(one.folder)
        for row in steps.filter(task_id="t001").iter_rows(named=True):
            assert row["prompt_ids"] == opening.opening([{"role": "user", "content": "What is 1 + 1?"}])[1].tolist()
        found.append(steps)
        close_engines()
    assert len(found[1]["prompt_ids"][0]) > len(found[0]["prompt_ids"][0])


def test_a_call_that_is_refused_by_vllm_is_told(live, policy):
    beyond = GenerationRequest(np.array([5, 100_000], dtype=np.int32), PLAIN, seed=0)
    with live.serving(policy), pytest.raises(EngineFault, match="out of vocabulary"):
        ask(live, [beyond])


# From here on the worker is ended.


@pytest.fixture(scope="module")
def smaller_policy(tmp_path_factory):
    """Of another shape than the one that the worker starts with."""
    return make_policy(tmp_path_factory.mktemp("smaller"), 5, num_hidden_layers=1, max_position_embeddings=256)


def test_a_policy_of_another_shape_is_served_after_a_restart(live, smaller_policy):
    process = worker_of(live)._process
    with live.serving(smaller_policy):
        assert worker_of(live)._process is not process
        assert live.context_length == 256
        requests = [GenerationRequest(prompt, PLAIN, seed=n) for n, prompt in enumerate(prompts(4))]
        assert difference(smaller_policy, requests, ask(live, requests)).max() < 1e-4


def ask_and_then(engine, requests, what):
    """Answers to the requests, in the middle of which something happens."""

    async def run():
        asked = [asyncio.create_task(engine.generate(one)) for one in requests]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        what()
        assert worker_of(engine).n_calls > 1
        return await asyncio.gather(*asked)

    return asyncio.run(asyncio.wait_for(run(), 400))


LONG = [
    GenerationRequest(prompt, SamplingParams(max_tokens=40 + n % 160), seed=n)
    for n, prompt in enumerate(prompts(400, seed=8))
]


def check_that_calls_outlive_the_worker(engine, policy, strike):
    """``strike`` gets the worker's processes, without its guard, while it has calls."""
    with engine.serving(policy):
        undisturbed = ids_of(ask(engine, LONG[:20]))
        process = worker_of(engine)._process
        _, *family = family_of(worker_of(engine))
        assert len(family) >= 3
        found = ask_and_then(engine, LONG, lambda: strike(family))
    assert ids_of(found)[:20] == undisturbed
    assert difference(policy, LONG, found).max() < 1e-4
    assert worker_of(engine)._process is not process
    assert not any(map(is_running, family))


def test_calls_outlive_a_worker_whose_engine_is_killed(live, smaller_policy):
    def kill(family):
        os.kill(next(one for one in family if "EngineCore" in name_of(one)), signal.SIGKILL)

    check_that_calls_outlive_the_worker(live, smaller_policy, kill)


def test_an_engine_that_is_closed_leaves_no_process_and_no_port(live):
    end(live)
    assert live.broken


@pytest.mark.full
def test_calls_outlive_a_worker_whose_processes_all_stop(python, policy, other_policy, tmp_path):
    """With the processes that vLLM has on a CPU where nothing else is set."""
    execution = VllmExecution(
        python=python, workers=1, env=SMALL, args={"max_num_seqs": 64}, log_dir=str(tmp_path / "logs"),
        hang_timeout_s=10, health_interval_s=0.5, backoff_s=0.5,
    )  # fmt: skip
    engine = VllmEngine(CONFIG, execution, probe_tolerance=1e-4)

    def stop(family):
        for process_id in family:
            os.kill(process_id, signal.SIGSTOP)

    try:
        engine.load(other_policy)
        process = worker_of(engine)._process
        engine.load(policy)
        assert worker_of(engine)._process is process
        check_that_calls_outlive_the_worker(engine, policy, stop)
    finally:
        end(engine)


@pytest.mark.full
def test_what_cannot_start_fails_with_the_end_of_its_log(python, policy, tmp_path):
    execution = VllmExecution(
        python=python, env={"VLLM_CPU_KVCACHE_SPACE": "100000"}, log_dir=str(tmp_path / "logs")
    )  # more memory than there is
    engine = VllmEngine(CONFIG, execution, probe_tolerance=1e-4)
    with pytest.raises(StageFailed, match="has ended while it started") as told:
        engine.load(policy)
    _, cause, *rest = str(told.value).splitlines()
    assert "it said: ValueError: Available memory" in cause
    assert any(line.startswith("the end of its log") for line in rest)
    assert len(rest) > 10
    engine.close()


PIPELINE = """
    import sys
    from pathlib import Path
    from stages.rollouts.engines.base import PolicyFiles, Probe
    from stages.rollouts.engines.vllm import VllmEngine
    from stages.rollouts.workers.settings import VllmConfig, VllmExecution
    python, folder, logs = sys.argv[1:]
    execution = VllmExecution(python=python, log_dir=logs)
    policy = PolicyFiles("p", Path(folder), Probe([], []))
    VllmEngine(VllmConfig(type="vllm"), execution, probe_tolerance=1.0).load(policy)
"""


@pytest.mark.full
def test_no_process_and_no_port_outlives_a_pipeline_that_is_killed(python, policy, tmp_path):
    pipeline = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PIPELINE), python, str(policy.folder), str(tmp_path / "logs")],
        env={**os.environ, **SMALL}, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert eventually(lambda: any("EngineCore" in name_of(one) for one in descendants(pipeline.pid)), within_s=300)
    family = descendants(pipeline.pid)
    (server,) = [one for one in family if "--port" in name_of(one) and "guard.py" not in name_of(one)]
    words = name_of(server).split()
    port = int(words[words.index("--port") + 1])
    pipeline.kill()
    pipeline.wait(60)
    assert eventually(lambda: not any(map(is_running, family)))
    assert is_free(port)


def test_the_python_with_vllm_is_asked_what_it_has(python):
    (slot,) = slots(VllmExecution(), python)
    assert slot.index == 0
    if slot.devices is None:
        both = slots(VllmExecution(workers=2), python)
        assert [one.index for one in both] == [0, 1]
        assert not set(both[0].cores) & set(both[1].cores)
    with pytest.raises(ConfigError, match="there is no vLLM in the environment"):
        slots(VllmExecution(), sys.executable)
