"""What was sampled of a model call that is given up, or fails, is kept."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import pytest
from anthropic import Anthropic, APIStatusError
from openai import APIError, OpenAI

from stages.rollouts.capture.episodes import episodes_of
from stages.rollouts.capture.log import FailedCall, SessionLog, read_session
from stages.rollouts.chat_template import chat_template_in
from stages.rollouts.engines.base import Retry
from stages.rollouts.engines.progress import Partial
from stages.rollouts.engines.scripted import ScriptedEngine, drawn_ids
from stages.rollouts.rows import call_errors_table
from tests.stages.rollouts.captured import HEAD, MODEL, captured
from tests.stages.rollouts.policies import make_endless_policy
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks

AGENTS = "tests/stages/rollouts/streaming_agents.py"
LONG = 8000
"""Tokens that take any machine many seconds."""
QUESTION = [{"role": "user", "content": "what is 12 + 7?"}]


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    return make_endless_policy(tmp_path_factory.mktemp("endless"))


@pytest.fixture(params=["chat", "completions", "responses", "messages"])
def reads(request):
    """Reads a stream of an API, and says what kind of error its client raises or gives.

    Args:
        begun: called when the first text has come.
    """
    return partial(_read, request.param)


def _read(api, begun, base_url, key):
    client: Any = OpenAI(base_url=base_url, api_key=key, max_retries=0)
    theirs: Any = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=key, max_retries=0)
    asked = {"model": MODEL, "stream": True}
    calls = {
        "chat": lambda: client.chat.completions.create(**asked, messages=QUESTION),
        "completions": lambda: client.completions.create(**asked, prompt="what is 12 + 7?"),
        "responses": lambda: client.responses.create(**asked, input=QUESTION),
        "messages": lambda: theirs.messages.create(**asked, messages=QUESTION, max_tokens=LONG),
    }
    texts = {
        "chat": lambda event: event.choices[0].delta.content,
        "completions": lambda event: event.choices[0].text,
        "responses": lambda event: event.delta if event.type == "response.output_text.delta" else "",
        "messages": lambda event: event.delta.text if event.type == "content_block_delta" else "",
    }
    n_texts = 0
    try:
        for event in calls[api]():
            if getattr(event, "type", "") == "error":
                return n_texts, event.code, event.message
            if texts[api](event):
                n_texts += 1
                begun()
    except APIError as error:
        return n_texts, error.code, error.message
    except APIStatusError as error:
        told: Any = error.body
        return n_texts, told["error"]["type"], told["error"]["message"]
    return n_texts, None, None


@pytest.fixture
def shelf(memory_store, endless):
    return memory_store, stored_tasks(memory_store, 2), stored_policy(memory_store, endless)


def made(shelf, agent, max_tokens, **config):
    """Episodes, steps and call errors of the agent's attempts."""
    store, tasks, policy = shelf
    config |= {"agent": f"{AGENTS}:{agent}", "sampling": {"max_tokens": max_tokens}}
    manifest = rolled_out(store, request(tasks, policy, config)).manifest
    return [frame(store, manifest, name) for name in ("episodes", "steps", "call_errors")]


def check_beginning(shelf, errors):
    """Each row has the question and the beginning of the answer that the same call has where it is not given up."""
    n = errors["response_ids"].list.len().to_list()
    episodes, steps, _ = made(shelf, "asks_once", max(n) + 5)
    whole = steps.join(episodes.select("episode_id", "task_id"), on="episode_id").sort("task_id")
    for n_sampled, error, step in zip(n, errors.iter_rows(named=True), whole.iter_rows(named=True), strict=True):
        assert error["policy_id"] == step["policy_id"]
        assert error["prompt_ids"] == step["prompt_ids"]
        assert error["response_ids"] == step["response_ids"][:n_sampled]
        assert np.allclose(error["logprobs"], step["logprobs"][:n_sampled], atol=1e-4)


def by_task(errors, episodes):
    return errors.join(episodes.select("episode_id", "task_id"), on="episode_id").sort("task_id")


def test_of_a_stream_that_its_client_hangs_up_all_that_was_sampled_is_kept(shelf, endless):
    episodes, steps, errors = made(shelf, "hangs_up_in_the_middle", LONG, agent_samples=True)
    assert steps["response_ids"].list.len().to_list() == [4, 4]
    assert errors.select("status", "kind").rows() == [("abandoned", "CancelledError")] * 2
    told, errors = episodes.sort("task_id")["artifacts"], by_task(errors, episodes)
    decode = chat_template_in(endless.folder).decode
    for artifacts, ids in zip(told, errors["response_ids"], strict=True):
        assert 0 < len(ids) < LONG
        assert decode(ids.to_numpy()).startswith(json.loads(artifacts)["answer"])
    check_beginning(shelf, errors)


def test_of_a_call_that_the_time_limit_ends_all_that_was_sampled_is_kept(shelf):
    episodes, steps, errors = made(shelf, "asks_once", LONG, episode_time_limit_s=6)
    assert set(episodes["status"]) == {"timeout"}
    assert len(steps) == 0
    assert errors.select("status", "kind").rows() == [("abandoned", "CancelledError")] * 2
    assert errors["response_ids"].list.len().min() > 0
    check_beginning(shelf, by_task(errors, episodes))


def test_of_a_request_that_is_no_call_nothing_is_known(shelf):
    store, tasks, policy = shelf
    config = {"agent": "tests/stages/rollouts/given_agents.py:sends_garbage_over_http"}
    errors = frame(store, rolled_out(store, request(tasks, policy, config)).manifest, "call_errors")
    assert errors.select("policy_id", "prompt_ids", "response_ids", "logprobs").null_count().row(0) == (4, 4, 4, 4)


def test_a_gateways_file_holds_what_is_known_of_calls_that_failed(tmp_path):
    at = datetime(2026, 1, 2, tzinfo=UTC)
    prompt, ids, logprobs = np.arange(5, dtype=np.int32), np.array([7, 8], np.int32), np.array([-1, -2], np.float32)
    partials = [None, Partial("p", prompt, None, None), Partial("p", prompt, ids[:0], logprobs[:0]),
                Partial("p", prompt, ids, logprobs)]  # fmt: skip
    log = SessionLog(tmp_path / "file")
    log.begin(HEAD)
    for known in partials:
        log.failed(FailedCall("default", at, "abandoned", "CancelledError", "gone", known))
    session = read_session(tmp_path / "file")
    assert session is not None
    assert [one.partial is None for one in session.errors] == [True, False, False, False]
    rows = call_errors_table(episodes_of([session], {HEAD.episode_id})).to_pylist()
    assert [(row["policy_id"], row["prompt_ids"]) for row in rows] == [(None, None)] + 3 * [("p", prompt.tolist())]
    assert [(row["response_ids"], row["logprobs"]) for row in rows] == [
        (None, None), (None, None), ([], []), ([7, 8], [-1.0, -2.0]),
    ]  # fmt: skip


def n_sampled(error):
    """How many tokens are known of a failed call, with a logprob each."""
    assert len(error.partial.response_ids) == len(error.partial.logprobs)
    return len(error.partial.response_ids)


def test_a_fault_in_the_middle_of_a_stream_reaches_the_client_and_is_recorded(reads, make_engine, endless, tmp_path):
    engine = make_engine()
    engine.load(endless)

    def breaks():
        engine._cache = None

    (n_texts, code, message), session = captured(engine, endless, tmp_path / "file", partial(reads, breaks), LONG)
    assert n_texts > 0
    assert code in ("engine_fault", "api_error")
    assert "engine transformers has stopped" in message
    assert session.calls == []
    (error,) = session.errors
    assert (error.status, error.kind) == ("refused", "EngineFault")
    assert 0 < n_sampled(error) < LONG


class BeginsAnew(ScriptedEngine):
    """Tells the beginning of an answer, and then has another one, as where a server dies and another goes on."""

    async def generate(self, request):
        other = np.array([9, 10, 11], dtype=np.int32)
        request.progress.begin(lambda: (other, np.zeros(3, dtype=np.float32)))
        request.progress.more()
        await asyncio.sleep(0.01)  # it is told
        retry = Retry("a-server", datetime(2026, 1, 3, tzinfo=UTC), "WorkerLost", "gone")
        return replace(await super().generate(request), retries=(retry,))


def test_an_answer_that_differs_from_what_was_told_is_refused_and_kept_whole(reads, endless, tmp_path):
    engine = BeginsAnew(drawn_ids(20))
    engine.load(endless)
    told, session = captured(engine, endless, tmp_path / "file", partial(reads, lambda: None), 20)
    assert told[:2] in ((1, "stream_broken"), (1, "api_error"))
    assert session.calls == []
    (refused,) = session.errors
    assert (refused.status, refused.kind) == ("refused", "StreamBroken")
    assert n_sampled(refused) == 20


def test_a_gateway_alone_keeps_what_servers_failed_at(endless, tmp_path):
    engine = BeginsAnew(lambda request, vocabulary: [9, 10, 11, 12])
    engine.load(endless)
    told, session = captured(engine, endless, tmp_path / "file", partial(_read, "chat", lambda: None), 4)
    assert told[1:] == (None, None)
    (step,), (error,) = session.calls, session.errors
    assert step.generation.response_ids.tolist() == [9, 10, 11, 12]
    assert (error.status, error.kind, error.message) == ("retried", "WorkerLost", "a-server: gone")
    assert error.partial is None
