"""Agents of other people's frameworks, unchanged, as programs of the rollouts stage: what is recorded of their calls.

The policy's answers are scripted: it calls a tool first, and tells the sum when it has been told the tool's result.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

from stages.rollouts.chat_template import ChatTemplate, chat_template_in
from stages.rollouts.engines import ENGINES, close_engines
from stages.rollouts.engines.base import GenerationRequest
from stages.rollouts.engines.scripted import ScriptedEngine
from tests.stages.rollouts.conversations import make_tool_policy, whole_sequences
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks

pytestmark = pytest.mark.frameworks

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-frameworks" / "bin" / "python"
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}
"""The frameworks' own settings that keep them from calling home."""

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
ANSWER = "The sum is 5."
ANSWER_AS_CALL = f'<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{ANSWER}"}}}}</tool_call>'
CODE = "Thought: I add.\n<code>\nprint(add(a=2, b=3))\n</code>"
ANSWER_AS_CODE = f"Thought: I know.\n<code>\nfinal_answer({ANSWER!r})\n</code>"


@dataclass(frozen=True)
class Recorded:
    """What is recorded of a program's two calls."""

    roles: tuple[str, ...]
    """Of the messages of the first call."""
    prompt_tokens: tuple[int, int] | None
    """Of each call's whole prompt. None: the program writes the call's id into it, which is another in each run."""
    response_tokens: tuple[int, int] = (69, 11)
    says: tuple[str, str] = (CALL, ANSWER)
    """What the policy answers."""
    prefix: int | None = None
    """Ids that the second prompt shares with what came before; None: all of them."""


CONTINUED = {
    "autogen": Recorded(("system", "user"), (402, 487)),
    "crewai": Recorded(("system", "user"), (513, 598)),
    "langchain": Recorded(("system", "user"), (288, 373)),
    "langgraph": Recorded(("user",), (261, 346)),
    "litellm": Recorded(("system", "user"), (288, 373)),
    "openai_agents": Recorded(("system", "user"), (367, 452)),
    "openai_agents_streaming": Recorded(("system", "user"), (382, 467)),
    "pydantic_ai": Recorded(("system", "user"), (333, 418)),
    "strands": Recorded(("system", "user"), (346, 431)),
}
REWRITTEN = {
    "smolagents": Recorded(("system", "user"), None, (69, 81), says=(CALL, ANSWER_AS_CALL), prefix=3598),
    "smolagents_code": Recorded(("system", "user"), (7694, 7953), (51, 55), says=(CODE, ANSWER_AS_CODE), prefix=7745),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tool_policy(tmp_path_factory.mktemp("policy"), context=16_384)


@pytest.fixture
def steps_of(policy, memory_store, tmp_path, monkeypatch):
    """Runs a framework's program once, and returns its two steps; what it printed must be the episode's answer."""
    for name, value in {**QUIET, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)

    def run(program: str, says: tuple[str, str]) -> pl.DataFrame:
        engine = ScriptedEngine(_in_turn(chat_template_in(policy.folder), says))
        monkeypatch.setitem(ENGINES, "scripted", lambda config, execution: engine)
        config = {
            "agent": {"command": [str(PYTHON), str(HERE / f"{program}_agent.py")]},
            "engine": {"type": "scripted"},
            "sampling": {"max_tokens": 200},
            "episode_time_limit_s": 120.0,
        }
        tasks = stored_tasks(memory_store, 1, instruction="What is 2 + 3?")
        manifest = rolled_out(memory_store, request(tasks, stored_policy(memory_store, policy), config)).manifest
        (episode,) = frame(memory_store, manifest, "episodes").iter_rows(named=True)
        assert episode["status"] == "completed", episode["error"]
        assert json.loads(episode["artifacts"]) == {"answer": ANSWER}
        return frame(memory_store, manifest, "steps").sort("step_index")

    close_engines()
    yield run
    close_engines()


def _in_turn(template: ChatTemplate, says: tuple[str, str]):
    """A script: the first text, until the prompt holds an answer."""
    replies = [[*template.encode(text).tolist(), template.stop_token_ids[-1]] for text in says]

    def script(request: GenerationRequest, vocabulary: int) -> list[int]:
        answered = template.decode_whole(request.prompt_ids).count("<|im_start|>assistant") > 1
        return replies[answered]

    return script


def _check(steps: pl.DataFrame, recorded: Recorded) -> None:
    prompts, sampled = zip(*whole_sequences(steps), strict=True)
    if recorded.prompt_tokens is not None:
        assert tuple(map(len, prompts)) == recorded.prompt_tokens
    assert tuple(map(len, sampled)) == recorded.response_tokens
    assert tuple(message["role"] for message in json.loads(steps["messages"][0])) == recorded.roles


@pytest.mark.parametrize("program", CONTINUED)
def test_a_framework_calls_its_tool_and_goes_on_from_what_was_sampled(program, steps_of, policy):
    recorded = CONTINUED[program]
    steps = steps_of(program, recorded.says)
    _check(steps, recorded)
    first, second = steps.iter_rows(named=True)
    assert second["prefix_length"] == len(first["prompt_ids"]) + len(first["response_ids"])
    (call,) = json.loads(first["tool_calls"])
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 2, "b": 3})
    (result,) = json.loads(second["messages"])
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "5", call["id"])
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    assert second["response"] == ANSWER


@pytest.mark.parametrize("program", REWRITTEN)
def test_a_framework_that_tells_an_answer_in_its_own_words_keeps_the_ids_that_both_share(program, steps_of):
    recorded = REWRITTEN[program]
    steps = steps_of(program, recorded.says)
    _check(steps, recorded)
    first, second = steps.iter_rows(named=True)
    assert second["prefix_length"] == recorded.prefix
    *before, told, result = json.loads(second["messages"])
    assert before == json.loads(first["messages"])
    assert told["role"] == "assistant"
    assert result["role"] == "user"
    assert re.search(r"\b5\b", result["content"][0]["text"])
