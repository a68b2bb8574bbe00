"""The gateway alone: programs that run elsewhere use it, and what they do becomes rollouts, whatever ends it."""

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from openai import AuthenticationError, OpenAI

from flows.call import stage_request
from schemas.artifacts import Manifest
from stages.artifacts.commit import materialise
from stages.artifacts.store import Store, open_store
from stages.rollouts.engines.base import PolicyFiles, Probe
from stages.rollouts.gateway.server import MAX_BODY
from tests.flows.commands import rollmill
from tests.flows.gateways import TOKEN, committed, gateway, gateway_for_a_moment, says
from tests.stages.rollouts.conversations import whole_sequences
from tests.stages.rollouts.policies import make_policy
from tests.stages.rollouts.stand_in import StandIn
from tests.stages.rollouts.stored import frame, stored_policy

SCRIPTED = ("--engine", "scripted", "engine.n_tokens=6")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def policy(store, tiny):
    return stored_policy(store, tiny)


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def made(
    store: Store, stage: str, inputs: dict[str, Any], config: dict[str, Any], execution: dict[str, Any]
) -> Manifest:
    """What a stage makes, in this process."""
    return materialise(store, stage_request(store, stage, inputs=inputs, config=config, execution=execution)).manifest


def test_what_clients_do_becomes_rollouts_that_the_next_stages_take(store, policy, tmp_path):
    with gateway(store, policy, tmp_path, "sampling.max_tokens=8") as running:
        for number in range(4):
            task = {"id": f"t{number % 2}", "instruction": f"Add {number % 2}.", "answer": "1", "metadata": {"a": 2}}
            told = running.opened(session_id=f"s{number}", task=task)
            client = OpenAI(base_url=told["base_url"], api_key=told["api_key"])
            messages = question(f"Add {number % 2}.")
            says(client, messages)
            messages += question("Are you sure?")
            says(client, messages)
            given = {"trajectories": {"default": {"reward": float(number)}}}
            assert running.ask("POST", f"/sessions/s{number}/end", {"artifacts": given}, told["api_key"])[0] == 200
        says(running.client("unannounced"), question("What now?"))
        assert running.process.ended_by(signal.SIGINT) == 0
        (rollouts,) = committed(store, running.output)
        assert "Traceback" not in running.output
    episodes, steps = frame(store, rollouts, "episodes"), frame(store, rollouts, "steps")
    assert rollouts.summary["n_episodes"] == len(episodes) == 5
    assert sorted(episodes.filter(task_id="t1")["rollout_index"]) == [0, 1]
    assert set(episodes["status"]) <= {"completed", "truncated"}
    for (episode_id,), own in steps.group_by("episode_id"):
        sequences = whole_sequences(own.sort("step_index"))
        if len(sequences) == 2:
            (prompt, sampled), (following, _) = sequences
            assert following[: len(prompt) + len(sampled)] == [*prompt, *sampled], episode_id
            assert json.loads(own.sort("step_index")["messages"][1]) == question("Are you sure?")
    tasks = frame(store, store.manifest(rollouts.inputs["tasks"][0]), "tasks")
    assert {row["task_id"]: row["instruction"] for row in tasks.iter_rows(named=True)}["t1"] == "Add 1."
    assert set(tasks.filter(answer="1")["metadata"]) == {'{"a":2}'}
    assert "What now?" in set(tasks["instruction"])
    rewards = made(store, "rewards", {"rollouts": [str(rollouts.ref)]}, {"grader": "agent"}, {"max_failed_share": 1})
    assert sorted(frame(store, rewards, "rewards")["reward"].drop_nulls()) == [0.0, 1.0, 2.0, 3.0]
    advantages = made(store, "advantages", {"rewards": [str(rewards.ref)]}, {}, {})
    assert frame(store, advantages, "advantages")["kept"].sum() == 4


@dataclass(frozen=True)
class Killed:
    """What a gateway that was killed has left: two sessions, of which ``b`` had ended."""

    captures: Path
    store: str
    key: str
    """Of session ``a``."""
    messages: list[dict[str, str]]
    """Of session ``a``, which had been asked twice."""
    traces: list[dict[str, Any]]
    """The same calls, as the gateway told them."""


@pytest.fixture(scope="module")
def once_killed(tiny: PolicyFiles, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    store = open_store(folder / "store")
    messages: list[dict[str, str]] = []
    with gateway(store, stored_policy(store, tiny), folder, *SCRIPTED) as running:
        key = running.opened(session_id="a")["api_key"]
        for text in ("One?", "Two?"):
            messages += question(text)
            says(running.client("a", key), messages)
        says(running.client("b"), question("One?"))
        _, traces = running.ask("GET", "/sessions/a/traces")
        assert running.ask("POST", "/sessions/b/end", {"error": "the agent fell"})[0] == 200
        running.process.ended_by(signal.SIGKILL)
    return Killed(folder / "captures", store.url, key, messages, traces)


@pytest.fixture
def killed(once_killed: Killed, store: Store, policy: Manifest, tmp_path: Path) -> Killed:
    """The same as if that gateway had been over the test's own store, with captures that are its own."""
    captures = shutil.copytree(once_killed.captures, tmp_path / "captures")
    (run,) = captures.glob("*/run.json")
    run.write_text(run.read_text().replace(once_killed.store, store.url))
    return replace(once_killed, captures=captures, store=store.url)


def test_a_killed_gateway_loses_no_finished_call(store, policy, tmp_path, killed):
    with gateway(store, policy, tmp_path, *SCRIPTED) as running:
        (rollouts,) = committed(store, running.output)
        says(running.client("a"), question("One?"))
        assert running.ask("GET", "/sessions/a")[1]["trace_count"] == 1, "a new session"
        assert running.process.ended_by(signal.SIGTERM) == 0
        assert len(committed(store, running.output)) == 2
    episodes = frame(store, rollouts, "episodes")
    assert {(row["status"], row["error_kind"]) for row in episodes.iter_rows(named=True)} == {
        ("timeout", "GatewayKilled"),
        ("error", "AgentError"),
    }
    (unfinished,) = episodes.filter(status="timeout")["episode_id"]
    own = frame(store, rollouts, "steps").filter(episode_id=unfinished).sort("step_index")
    assert [(one["prompt_token_ids"], one["completion_token_ids"]) for one in killed.traces] == whole_sequences(own)
    assert [one["logprobs"] for one in killed.traces] == own["logprobs"].to_list()
    assert not list(killed.captures.iterdir())


def test_sessions_of_a_killed_gateway_go_on_from_their_exact_ids(store, policy, tmp_path, killed):
    (file,) = (file for file in killed.captures.glob("*/sessions/*") if b"the agent fell" not in file.read_bytes())
    file.write_bytes(file.read_bytes() + b"half a record")
    with gateway(store, policy, tmp_path, "--resume", *SCRIPTED) as running:
        assert not committed(store, running.output)
        says(running.client("a", killed.key), killed.messages + question("Three?"))
        assert running.process.ended_by(signal.SIGTERM) == 0
        (rollouts,) = committed(store, running.output)
    episodes = frame(store, rollouts, "episodes")
    assert sorted(episodes["status"]) == ["error", "truncated"]
    (own,) = episodes.filter(status="truncated")["episode_id"]
    steps = frame(store, rollouts, "steps").filter(episode_id=own).sort("step_index")
    first, second, third = whole_sequences(steps)
    assert [first, second] == [(one["prompt_token_ids"], one["completion_token_ids"]) for one in killed.traces]
    assert third[0][: steps["prefix_length"][2]] == [*second[0], *second[1]]
    assert len(set(steps["seed"])) == 3


def test_a_commit_that_is_killed_is_finished_once(store, policy, tmp_path, killed):
    (run,) = killed.captures.iterdir()
    (run / "batches" / "0").mkdir(parents=True)
    for file in (run / "sessions").iterdir():
        file.rename(run / "batches" / "0" / file.name)
    shutil.copytree(killed.captures, tmp_path / "as-it-was")
    made = []
    for _ in range(2):  # the second time as if the first had been killed after its last write
        made += committed(store, gateway_for_a_moment(store, policy, killed.captures, *SCRIPTED))
        assert not list(killed.captures.iterdir())
        shutil.copytree(tmp_path / "as-it-was", killed.captures, dirs_exist_ok=True)
    assert made[0].ref == made[1].ref
    assert len(list(Path(store.url).glob("artifacts/rollouts/*"))) == 1


def test_a_session_is_opened_by_its_key_and_the_token_only_and_bad_input_is_refused(store, policy, tmp_path):
    with gateway(store, policy, tmp_path, *SCRIPTED) as running:
        a, b = (running.opened(session_id=name) for name in "ab")
        says(running.client("a", a["api_key"]), question("One?"))
        for client in (running.client("b", a["api_key"]), running.client("a", "wrong"), running.client("c", "wrong")):
            with pytest.raises(AuthenticationError):
                says(client, question("One?"))
        assert running.ask("GET", "/sessions/a/traces", key=b["api_key"])[0] == 401
        assert running.ask("GET", "/sessions/nobody/traces")[0] == 404
        assert [running.ask(*words, key=a["api_key"])[0] for words in (("GET", "/sessions"), ("POST", "/commit"))] == [
            401,
            401,
        ]
        assert running.ask("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
        assert running.ask("GET", "/health")[1]["status"] == "ok"
        chat = "/sessions/a/v1/chat/completions"
        asked = {"model": "tiny", "messages": question("x" * 2000)}
        huge = json.dumps({"model": "tiny", "messages": question("x" * MAX_BODY)}).encode()
        refused = [
            running.ask("POST", chat, body, a["api_key"]) for body in (b"{", {**asked, "model": "gpt"}, asked, huge)
        ]
        assert [(status, told["error"]["code"]) for status, told in refused] == [
            (400, "invalid_json"),
            (404, "model_not_found"),
            (400, "context_length_exceeded"),
            (413, "request_too_large"),
        ]
        wrong = [
            {"session_id": "x/y"}, {"task": {"id": 3}}, {"tasks": {}}, {"session_id": "a", "task": {"id": "another"}},
            {"task": {"id": "t", "instruction": "one"}}, {"task": {"id": "t", "instruction": "two"}},
        ]  # fmt: skip
        assert [running.ask("POST", "/sessions", body)[0] for body in wrong] == [400, 400, 400, 400, 200, 400]
        assert running.ask("POST", "/sessions/a/end")[0] == 200
        with pytest.raises(AuthenticationError):
            says(running.client("a", a["api_key"]), question("One?"))
        status, told = running.ask("POST", "/commit")
        assert (status, told["episodes"]) == (200, 1)
        errors = frame(store, store.resolve(told["rollouts"]), "call_errors")
        assert len(errors) == 4
        assert TOKEN not in "".join(errors["message"])
        assert running.ask("POST", "/commit")[1]["rollouts"] is None


def test_a_wrong_command_is_told_what_is_wrong(store, policy, tmp_path):
    for words, said in (
        ((), "needs a policy"),
        (("--policy", str(policy.ref), "--token", "short"), "shorter than 16"),
        (("--policy", str(policy.ref), "--engine", "vlm"), "unknown engine 'vlm'"),
        (("--policy", str(policy.ref), "samplin.top_p=1"), "unknown key 'samplin'"),
    ):
        done = rollmill("gateway", *words, "--store", store.url, "--captures", tmp_path)
        assert (done.code, said in done.err) == (2, True), done.text


def test_given_servers_share_the_sessions_and_one_that_dies_is_done_without(store, tmp_path):
    policy = uniform_policy(tmp_path)
    servers = [StandIn(vocabulary=304, context=256) for _ in range(2)]
    try:
        words = [word for server in servers for word in ("--url", server.url)]
        with gateway(store, stored_policy(store, policy), tmp_path, *words, "sampling.max_tokens=4") as running:
            talks = {name: (running.client(name), question(name)) for name in ("a", "b", "c", "d")}
            for server in servers:
                server.seconds = 0.5
            for _ in range(2):
                with ThreadPoolExecutor() as at_once:
                    list(at_once.map(lambda talk: says(*talk), talks.values()))
                for _, messages in talks.values():
                    messages += question("Go on.")
            servers[0].stop_listening()
            for client, messages in talks.values():
                says(client, messages)
            _, workers = running.ask("GET", "/admin/workers")
            assert len(workers) == 2
            assert running.process.ended_by(signal.SIGTERM) == 0
            (rollouts,) = committed(store, running.output)
    finally:
        servers[0].listen_again()
        for server in servers:
            server.close()
    steps = frame(store, rollouts, "steps")
    assert len(steps) == 12
    before = steps.filter(pl.col("step_index") < 2)
    assert set(before.group_by("episode_id").agg(pl.col("worker").n_unique())["worker"]) == {1}, "a session sticks"
    assert before["worker"].n_unique() == 2
    assert steps.filter(step_index=2)["worker"].unique().to_list() == [f"vllm:127.0.0.1:{servers[1].port}"]


def uniform_policy(folder: Path) -> PolicyFiles:
    """What stand-ins serve, with a tokenizer."""
    files = make_policy(folder / "policy")
    logprobs = [np.full(len(ids) - 1, -np.log(304), np.float32) for ids in files.probe.ids]
    return replace(files, probe=Probe(files.probe.ids, logprobs))
