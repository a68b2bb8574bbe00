"""A chat with an endpoint, recorded as text: what it does not give (ids, logprobs, the policy's key) is None.

Messages, tools and what agents wish go there as they are, and reasoning, tool calls and usage come back as it tells
them; nothing is rendered, parsed or counted here.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from schemas.canonical import seed_from
from stages.rollouts.calls import ModelAnswer, ModelCall, ToolCall
from stages.rollouts.endpoints.answers import Answer, chat_answer, completion_answer
from stages.rollouts.endpoints.client import Asked
from stages.rollouts.endpoints.settings import EndpointConfig
from stages.rollouts.engines.base import SamplingParams
from stages.rollouts.engines.progress import Progress
from stages.rollouts.sdk import MaxTurnsReached, Messages, Reply
from stages.rollouts.session import key_after, prefix_keys
from stages.rollouts.telling import Teller

Ask = Callable[[Any, str, dict[str, Any], Callable[[dict[str, Any]], Answer]], Awaitable[Asked]]
"""Given what tells a call from others of the same text, the path, the body, and what reads the answer."""
_LARGEST_SEED = 2**31 - 1
"""What every server takes."""


@dataclass(frozen=True)
class Sent:
    """How the endpoint was told to sample; None: it was not told, and its own default counts."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    json_schema: str | None


@dataclass(frozen=True)
class TextGeneration:
    """What is known of how an answer came about."""

    finish_reason: str
    worker: str
    started_at: datetime
    latency_s: float
    policy_id: None = None
    retries: tuple[()] = ()


@dataclass(frozen=True)
class TextStep:
    """One finished model call, as the ``steps`` table has it."""

    trajectory: str
    step_index: int
    messages: Messages
    response: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    prompt_tokens: int | None
    response_tokens: int | None
    generation: TextGeneration
    sampling: Sent
    seed: int | None
    prefix_length: None = None
    prompt_ids: None = None
    response_ids: None = None
    logprobs: None = None

    @property
    def finish_reason(self) -> str:
        return self.generation.finish_reason


@dataclass(eq=False)
class _Turn:
    messages: Messages
    key: bytes
    """Of ``messages`` with the answer."""
    answer: Answer | None = None
    """None: not answered."""
    asked: Asked | None = None
    body: dict[str, Any] | None = None
    json_schema: str | None = None


class EndpointSession:
    """The model calls of one trajectory."""

    def __init__(
        self,
        trajectory: str,
        *,
        ask: Ask,
        config: EndpointConfig,
        sampling: SamplingParams,
        max_turns: int | None,
        seed: int,
        uid: str,
        agent_samples: bool = False,
        stop: tuple[str, ...] = (),
    ):
        self._trajectory = trajectory
        self._ask = ask
        self._config = config
        self._sampling = sampling
        self._max_turns = max_turns
        self._seed = seed
        self._uid = uid
        self._agent_samples = agent_samples
        self._stop = stop
        self._turns: list[_Turn] = []
        self._n_asked = 0

    async def chat(self, messages: Messages, progress: Progress | None = None) -> Reply:
        """Asks for the next message.

        Args:
            progress: is told nothing: neither ids nor a policy are known here.

        Raises:
            MaxTurnsReached: the trajectory has made all the calls that it may.
            CallRefused: the endpoint does not answer this call.
            EngineFault: it answers none.
        """
        answer = await self._answered(ModelCall(list(messages)))
        return Reply(text=answer.content or "", finish_reason=answer.finish_reason)

    async def call(
        self, call: ModelCall, teller: Teller | None = None, progress: Progress | None = None
    ) -> ModelAnswer:
        """The same with everything that an API can ask for; nothing is told before the answer is whole."""
        answer = await self._answered(call)
        return ModelAnswer(
            content=answer.content or "",
            reasoning=answer.reasoning,
            tool_calls=answer.tool_calls,
            finish_reason=answer.finish_reason,
            stop_text=None,
            prompt_tokens=answer.prompt_tokens,
            response_tokens=answer.response_tokens,
            response_ids=None,
            logprobs=None,
        )

    async def _answered(self, call: ModelCall) -> Answer:
        if self._max_turns is not None and len(self._turns) >= self._max_turns:
            raise MaxTurnsReached(f"trajectory {self._trajectory!r} has made its {self._max_turns} model calls")
        path, read = ("/chat/completions", chat_answer) if call.prompt is None else ("/completions", completion_answer)
        messages = call.messages if call.prompt is None else [{"role": "user", "content": _written(call.prompt)}]
        seed = self._seed_of(call)
        call_id = [self._uid, self._trajectory, seed]
        turn = _Turn(messages, b"", body=self._body(call, seed), json_schema=call.json_schema)
        self._turns.append(turn)
        self._n_asked += 1
        assert turn.body is not None
        try:
            turn.asked = await self._ask(call_id, path, turn.body, read)
        except BaseException:  # a call that nobody waited for counts for nothing
            self._turns.remove(turn)
            raise
        turn.answer = read(turn.asked.told)
        calls = [tool_call.as_message_part() for tool_call in turn.answer.tool_calls]
        said = {"role": "assistant", "content": turn.answer.content or "", **({"tool_calls": calls} if calls else {})}
        turn.key = key_after(prefix_keys(messages)[-1], said)
        return turn.answer

    def _seed_of(self, call: ModelCall) -> int:
        if self._agent_samples and call.seed is not None:
            return (seed_from(call.seed, call.choice) if call.choice else call.seed) & _LARGEST_SEED
        return seed_from(self._seed, self._trajectory, self._n_asked) & _LARGEST_SEED

    def _body(self, call: ModelCall, seed: int) -> dict[str, Any]:
        sampling = self._sampling
        if self._agent_samples:
            wishes = {name: getattr(call, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
            sampling = replace(sampling, **{name: wish for name, wish in wishes.items() if wish is not None})
        settings = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": seed,
        }
        for name in self._config.omit:
            settings.pop(name, None)
        if "max_tokens" in settings:
            settings[self._config.token_limit] = settings.pop("max_tokens")
        body: dict[str, Any] = {"model": self._config.model, **settings}
        if sampling.top_k is not None:
            body["top_k"] = sampling.top_k
        if stop := [*dict.fromkeys([*self._stop, *call.stop])]:
            body["stop"] = stop
        if call.json_schema is not None:
            form = {"name": "answer", "schema": json.loads(call.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        if call.prompt is not None:
            return body | {"prompt": call.prompt.tolist() if isinstance(call.prompt, np.ndarray) else call.prompt}
        return body | {"messages": call.messages} | ({"tools": call.tools} if call.tools else {})

    def steps(self) -> list[TextStep]:
        """The answered calls in the order in which they were made."""
        found: list[TextStep] = []
        before: _Turn | None = None
        for turn in self._turns:
            if turn.answer is None or turn.asked is None or turn.body is None:
                continue
            n_known = 0 if before is None else len(before.messages) + 1
            goes_on = before is not None and before.key in prefix_keys(turn.messages)[n_known : n_known + 1]
            body, answer = turn.body, turn.answer
            found.append(
                TextStep(
                    trajectory=self._trajectory,
                    step_index=len(found),
                    messages=turn.messages[n_known:] if goes_on else turn.messages,
                    response=answer.content,
                    reasoning=answer.reasoning,
                    tool_calls=answer.tool_calls,
                    prompt_tokens=answer.prompt_tokens,
                    response_tokens=answer.response_tokens,
                    generation=TextGeneration(
                        finish_reason=answer.finish_reason,
                        worker=f"endpoint {self._config.model}",
                        started_at=turn.asked.started_at,
                        latency_s=turn.asked.latency_s,
                    ),
                    sampling=Sent(body.get("temperature"), body.get("top_p"), body.get("top_k"), turn.json_schema),
                    seed=body.get("seed"),
                )
            )
            before = turn
        return found


def _written(prompt: str | np.ndarray) -> str:
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt.tolist()))
