"""The transformers engine: what it samples, its logprobs, how it is loaded, shared and stopped."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.errors import InputError, StageFailed
from stages.rollouts.engines.base import EngineFault, GenerationRequest, PolicyFiles, Probe, SamplingParams
from stages.rollouts.engines.progress import Progress
from tests.stages.rollouts.policies import forward_logprobs, make_policy
from tests.stages.rollouts.processes import eventually

PLAIN = SamplingParams(max_tokens=12)


def prompts(count, seed=0, longest=30):
    random = np.random.default_rng(seed)
    return [random.integers(3, 300, size=size).astype(np.int32) for size in random.integers(1, longest, size=count)]


def ask(engine, requests):
    async def run():
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(run())


def answers(generations):
    return [generation.response_ids.tolist() for generation in generations]


def assert_logprobs_are_a_forward_pass(policy, requests, generations, atol=1e-5):
    for request, generation in zip(requests, generations, strict=True):
        whole = forward_logprobs(policy.folder, np.concatenate([request.prompt_ids, generation.response_ids]))
        n = len(generation.response_ids)
        np.testing.assert_allclose(generation.logprobs, whole[-n:], atol=atol)


def test_greedy_is_what_transformers_generates(engine, policy):
    model = AutoModelForCausalLM.from_pretrained(policy.folder)
    sampling = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(2,))
    requests = [GenerationRequest(prompt, sampling, seed=n) for n, prompt in enumerate(prompts(6))]
    for request, generation in zip(requests, ask(engine, requests), strict=True):
        with torch.no_grad():
            theirs = model.generate(
                torch.from_numpy(request.prompt_ids.astype(np.int64))[None],
                do_sample=False, max_new_tokens=20, eos_token_id=2,
            )[0, len(request.prompt_ids) :]  # fmt: skip
        assert generation.response_ids.tolist() == theirs.tolist()


def test_stored_logprobs_are_those_of_a_full_forward_pass_whatever_the_sampling(engine, policy):
    kinds = [PLAIN, replace(PLAIN, temperature=0.5), replace(PLAIN, top_p=0.8, top_k=20), replace(PLAIN, temperature=0)]
    requests = [GenerationRequest(prompt, kinds[n % 4], seed=n) for n, prompt in enumerate(prompts(12))]
    assert_logprobs_are_a_forward_pass(policy, requests, ask(engine, requests))


@pytest.fixture(scope="session")
def alone(engine):
    """Calls, and the answers when each is asked by itself."""
    requests = [
        GenerationRequest(prompt, replace(PLAIN, max_tokens=2 + 3 * (n % 4)), seed=n)
        for n, prompt in enumerate(prompts(24, seed=3))
    ]
    return requests, [ask(engine, [request])[0].response_ids.tolist() for request in requests]


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(24)), count=st.integers(1, 24))
def test_a_sample_does_not_depend_on_what_else_is_asked(engine, alone, order, count):
    requests, wanted = alone
    found = ask(engine, [requests[n] for n in order[:count]])
    assert answers(found) == [wanted[n] for n in order[:count]]


@pytest.mark.parametrize("max_batch", [1, 3, 64])
def test_the_size_of_the_batch_changes_nothing(engine, make_engine, policy, max_batch):
    requests = [GenerationRequest(prompt, PLAIN, seed=n) for n, prompt in enumerate(prompts(20, seed=9))]
    other = make_engine(max_batch=max_batch)
    other.load(policy)
    assert answers(ask(other, requests)) == answers(ask(engine, requests))


def test_a_prompt_that_many_ask_is_answered_for_each(engine, policy):
    prompt = prompts(1)[0]
    requests = [GenerationRequest(prompt, PLAIN, seed=n) for n in range(40)]
    found = answers(ask(engine, requests))
    assert len({tuple(ids) for ids in found}) > 30
    assert found[7] == ask(engine, [requests[7]])[0].response_ids.tolist()


def test_samples_follow_the_policys_own_distribution(engine, policy):
    prompt = prompts(1, seed=5)[0]
    n = 2000
    once = SamplingParams(max_tokens=1)
    found = np.array(answers(ask(engine, [GenerationRequest(prompt, once, seed=s) for s in range(n)])))[:, 0]
    model = AutoModelForCausalLM.from_pretrained(policy.folder)
    with torch.no_grad():
        wanted = model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].softmax(-1).numpy()
    counts = np.bincount(found, minlength=len(wanted))
    likely = wanted > 0.004
    assert likely.sum() > 3
    assert np.all(np.abs(counts[likely] / n - wanted[likely]) < 5 * np.sqrt(wanted[likely] / n))


def test_a_stop_token_ends_the_answer_and_is_kept(engine):
    prompt = prompts(1, seed=2)[0]
    free = ask(engine, [GenerationRequest(prompt, PLAIN, seed=4)])[0]
    stop = int(free.response_ids[5])
    first = int(np.flatnonzero(free.response_ids == stop)[0])
    stopped = ask(engine, [GenerationRequest(prompt, replace(PLAIN, stop_token_ids=(1, stop)), seed=4)])[0]
    assert stopped.response_ids.tolist() == free.response_ids[: first + 1].tolist()
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert len(stopped.logprobs) == first + 1
    assert stopped.policy_id == engine.policy_id


def test_long_answers_outgrow_the_first_buffers(engine, policy):
    requests = [
        GenerationRequest(prompt, SamplingParams(max_tokens=150), seed=n) for n, prompt in enumerate(prompts(3))
    ]
    found = ask(engine, requests)
    assert [len(generation.response_ids) for generation in found] == [150] * 3
    assert_logprobs_are_a_forward_pass(policy, requests, found)


def test_models_with_a_sliding_window_or_biased_heads_are_sampled_right(tmp_path, make_engine):
    from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 304, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.15, "eos_token_id": 2,
    }  # fmt: skip
    for name, model in {
        "mistral": MistralForCausalLM(MistralConfig(**shape, sliding_window=7)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False)),
    }.items():
        torch.manual_seed(3)
        folder = tmp_path / name
        policy = make_policy(folder)
        model.save_pretrained(folder)
        probe = Probe(policy.probe.ids, [forward_logprobs(folder, ids) for ids in policy.probe.ids])
        policy = replace(policy, probe=probe)
        engine = make_engine()
        engine.load(policy)
        requests = [GenerationRequest(prompt, PLAIN, seed=n) for n, prompt in enumerate(prompts(5, longest=20))]
        assert_logprobs_are_a_forward_pass(policy, requests, ask(engine, requests))


@pytest.mark.shared_data
def test_a_real_trained_model_tells_the_story_that_transformers_tells(shared_data, make_engine):
    folder = shared_data / "model_stories260k"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = np.array(tokenizer.encode("Once upon a time"), dtype=np.int32)
    probe = Probe([prompt], [forward_logprobs(folder, prompt)])
    policy = PolicyFiles("stories", folder, probe)
    engine = make_engine()
    engine.load(policy)
    greedy = SamplingParams(temperature=0, max_tokens=60, stop_token_ids=(1,))
    sampled = SamplingParams(max_tokens=180, stop_token_ids=(1,))
    requests = [GenerationRequest(prompt, greedy, 0), *(GenerationRequest(prompt, sampled, seed) for seed in range(32))]
    story, *stories = ask(engine, requests)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder).generate(
            torch.from_numpy(prompt.astype(np.int64))[None], do_sample=False, max_new_tokens=60, eos_token_id=1
        )[0, len(prompt) :]
    assert story.response_ids.tolist() == theirs.tolist()
    assert_logprobs_are_a_forward_pass(policy, requests[1:5], stories[:4], atol=5e-5)
    # The folder's note gives the share of stories that mention mom: .54 of 256 sampled ones.
    share = np.mean(["mom" in tokenizer.decode(story.response_ids) for story in stories])
    assert 0.25 < share < 0.8


def test_another_policy_is_taken_and_the_first_one_again(make_engine, policy, other_policy):
    engine = make_engine()
    request = GenerationRequest(prompts(1)[0], PLAIN, seed=1)
    found = []
    for current in (policy, other_policy, policy):
        with engine.serving(current):
            (generation,) = ask(engine, [request])
            assert generation.policy_id == current.policy_id
            assert_logprobs_are_a_forward_pass(current, [request], [generation])
            found.append(generation.response_ids.tolist())
    assert found[0] == found[2] != found[1]


def test_weights_that_are_not_the_probes_are_refused_by_how_much(make_engine, policy, other_policy):
    engine = make_engine()
    swapped = replace(other_policy, folder=policy.folder)
    with pytest.raises(StageFailed, match=r"off by up to [\d.]+, and 0.0001 is tolerated"):
        engine.load(swapped)
    assert engine.policy_id is None
    with engine.serving(policy):
        assert ask(engine, [GenerationRequest(prompts(1)[0], PLAIN, seed=1)])[0].policy_id == policy.policy_id


def test_one_wrong_logprob_in_the_probe_is_enough_and_a_tolerance_decides(make_engine, policy):
    logprobs = [values.copy() for values in policy.probe.logprobs]
    logprobs[1][-1] += 0.01
    nudged = replace(policy, probe=Probe(policy.probe.ids, logprobs))
    with pytest.raises(StageFailed, match=r"up to 0\.01"):
        make_engine().load(nudged)
    make_engine(probe_tolerance=0.02).load(nudged)
    logprobs[1][-1] = np.nan
    with pytest.raises(StageFailed, match="inf"):
        make_engine(probe_tolerance=0.02).load(replace(policy, probe=Probe(policy.probe.ids, logprobs)))
    with pytest.raises(InputError, match="no sequence"):
        make_engine().load(replace(policy, probe=Probe([], [])))


def test_a_checkpoint_with_a_tensor_missing_is_refused(tmp_path, make_engine):
    from safetensors.torch import load_file, save_file

    policy = make_policy(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageFailed, match="up_proj"):
        make_engine().load(policy)


def test_bfloat16_is_coarser_and_says_so(make_engine, policy):
    with pytest.raises(StageFailed, match="coarser"):
        make_engine(dtype="bfloat16").load(policy)
    engine = make_engine(dtype="bfloat16", probe_tolerance=0.5)
    engine.load(policy)
    (generation,) = ask(engine, [GenerationRequest(prompts(1)[0], PLAIN, seed=1)])
    assert len(generation.response_ids) == 12


def test_a_cancelled_call_leaves_the_batch_and_hurts_nobody(engine):
    requests = [
        GenerationRequest(prompt, replace(PLAIN, max_tokens=200), seed=n) for n, prompt in enumerate(prompts(6))
    ]
    undisturbed = answers(ask(engine, requests[1:]))

    async def run():
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, *others = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert answers(others) == undisturbed


def test_a_fault_of_the_model_reaches_every_caller_and_the_next_ones(make_engine, policy):
    engine = make_engine()
    engine.load(policy)
    beyond = np.array([5, 100_000], dtype=np.int32)
    requests = [GenerationRequest(prompt, PLAIN, seed=0) for prompt in (beyond, *prompts(3))]

    async def run():
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    assert all(isinstance(found, EngineFault) for found in asyncio.run(run()))
    with pytest.raises(EngineFault, match="has stopped"):
        ask(engine, requests[1:2])


def test_what_was_sampled_is_known_until_whoever_asked_has_it(engine):
    async def run():
        progress = Progress()
        request = GenerationRequest(prompts(1)[0], replace(PLAIN, max_tokens=5), seed=0, progress=progress)
        asked = asyncio.ensure_future(engine.generate(request))
        await asyncio.sleep(0)  # from here on nobody takes the answer
        assert eventually(lambda: len(progress.sampled()[0]) == 5)
        time.sleep(0.1)  # the engine has gone on
        return progress.sampled(), await asked

    (ids, logprobs), answer = asyncio.run(run())
    assert ids.tolist() == answer.response_ids.tolist()
    assert logprobs.tolist() == answer.logprobs.tolist()


def test_what_was_sampled_of_a_call_that_is_cancelled_stays_known(engine):
    async def run():
        progress = Progress()
        request = GenerationRequest(prompts(1)[0], replace(PLAIN, max_tokens=200), seed=0, progress=progress)
        asked = asyncio.ensure_future(engine.generate(request))
        await asyncio.sleep(0)
        assert eventually(lambda: len(progress.sampled()[0]) > 2)
        asked.cancel()
        await asyncio.wait([asked])
        time.sleep(0.1)
        return asked.cancelled(), progress.sampled()[0]

    is_cancelled, ids = asyncio.run(run())
    assert is_cancelled
    assert len(ids) > 2


def test_a_closed_engine_answers_no_more(make_engine, policy):
    engine = make_engine()
    engine.load(policy)
    engine.close()
    with pytest.raises(EngineFault, match="closed"):
        ask(engine, [GenerationRequest(prompts(1)[0], PLAIN, seed=0)])


def test_who_wants_another_policy_waits_until_the_engine_is_free(make_engine, policy, other_policy):
    import threading

    engine = make_engine()
    order = []

    def later():
        with engine.serving(other_policy):
            order.append("other")

    with engine.serving(policy):
        thread = threading.Thread(target=later)
        thread.start()
        with engine.serving(policy):  # the same policy may be used twice at once
            order.append("same")
        thread.join(timeout=0.1)
        order.append("first done")
    thread.join()
    assert order == ["same", "first done", "other"]
