"""A chat over an engine that speaks token ids, recorded exactly.

When new messages extend an earlier call and its answer, the prompt continues from the ids that were
sampled, and only the text after them is encoded. When they do not, or when the template renders the
answer differently from what was sampled, a new sequence starts. Nothing sampled is ever re-tokenised.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from schemas.canonical import canonical_json, seed_from
from schemas.errors import RollmillError
from stages.rollouts.calls import ModelAnswer, ModelCall, ToolCall
from stages.rollouts.chat_template import ChatTemplate, text_of
from stages.rollouts.engines.base import (
    Engine,
    EngineFault,
    Generation,
    GenerationRequest,
    SamplingParams,
    Unsupported,
)
from stages.rollouts.engines.progress import Progress
from stages.rollouts.engines.stopping import TextOf, found_in
from stages.rollouts.formats import Parsed, parsed, sure
from stages.rollouts.known import Known, hasher_of
from stages.rollouts.sdk import MaxTurnsReached, Messages, Reply
from stages.rollouts.sequence import TokenSequence, common_prefix
from stages.rollouts.telling import Reading, StreamBroken, Teller
from stages.rollouts.written import Written, continued

_END = 16
"""Characters of a prompt in which it is seen whether it has opened the reasoning."""
_TAIL = 8
"""Ids of a prompt that has no template, after which its answer is decoded."""


class ContextExceeded(RollmillError):
    """A prompt leaves no room for an answer."""


class PromptRefused(RollmillError):
    """A prompt has ids that the policy does not know."""


@dataclass(frozen=True)
class RecordedStep:
    """One finished model call, as the ``steps`` table has it."""

    trajectory: str
    step_index: int
    messages: Messages
    """Those that are new since the step before; all, where this one does not continue it."""
    response: str
    """Without reasoning and tool calls, where the call was one that takes them apart."""
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    prefix_length: int
    prompt_ids: np.ndarray
    prompt_tokens: int
    """Tokens of the full prompt."""
    generation: Generation
    sampling: SamplingParams
    seed: int

    @property
    def response_ids(self) -> np.ndarray:
        return self.generation.response_ids

    @property
    def logprobs(self) -> np.ndarray:
        return self.generation.logprobs

    @property
    def response_tokens(self) -> int:
        return len(self.generation.response_ids)

    @property
    def finish_reason(self) -> str:
        """Why sampling ended; ``tool_calls`` where it ended to call tools."""
        return _reason(self.tool_calls, self.generation)


@dataclass(frozen=True)
class _Head:
    """A rendered text that has been hashed as far as it goes."""

    length: int = 0
    hasher: "hashlib.blake2b" = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def followed_by(self, text: str) -> "_Head":
        hasher = self.hasher.copy()
        hasher.update(_in_bytes(text))
        return _Head(self.length + len(text), hasher)


@dataclass(eq=False)
class _Turn:
    parent: "_Turn | None"
    """The call that this one continues, id for id."""
    messages: Messages
    new_messages: Messages
    prompt: TokenSequence
    text: str = ""
    """The rendered prompt, without what is ``before``."""
    before: "_Head | None" = None
    """The rendered text that the prompt goes on with; None: none, or it is answered."""
    key: bytes = b""
    """Of ``messages``; see ``key_after``."""
    seed: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    generation: Generation | None = None
    """None: not answered."""
    sequence: TokenSequence = field(default_factory=TokenSequence)
    """Prompt and answer."""
    raw: str = ""
    """The answer as it was decoded."""
    told: Parsed | None = None
    """The same taken apart; None: nobody asked for that."""
    tool_calls: tuple[ToolCall, ...] = ()
    is_thinking: bool = False
    """Whether the prompt has opened the reasoning already."""
    head: tuple[int, bytes] = (0, b"")
    """Length and hash of the rendered prompt with the answer; kept instead of the text."""

    @property
    def stop_id(self) -> int | None:
        """The stop token that was sampled; None: the answer was cut, or ended at a text."""
        assert self.generation is not None
        last = int(self.generation.response_ids[-1])
        return last if last in self.sampling.stop_token_ids else None


@dataclass
class _Read:
    """The call that was read last."""

    known: Known
    turn: _Turn
    tools: bytes | None
    """Digest of those that were offered; None: they cannot be compared."""
    head: _Head | None = None
    """Prompt and answer as text; None: it is not answered."""


class Session:
    """The model calls of one trajectory."""

    def __init__(
        self,
        trajectory: str,
        *,
        template: ChatTemplate,
        engine: Engine,
        policy_id: str,
        sampling: SamplingParams,
        max_turns: int | None,
        seed: int,
        uid: str,
        agent_samples: bool = False,
    ):
        self._trajectory = trajectory
        self._template = template
        self._engine = engine
        self._policy_id = policy_id
        self._sampling = sampling
        self._max_turns = max_turns
        self._seed = seed
        self._uid = uid
        self._agent_samples = agent_samples
        self._turns: list[_Turn] = []
        self._n_asked = 0
        """Calls, those that were given up included."""
        self._answered: dict[bytes, _Turn] = {}
        """By the hash of a call's messages with its answer."""
        self._read_before: _Read | None = None
        """None: no call, or none that can be compared."""
        self._written: dict[Written, _Turn] = {}
        """Those whose prompts were texts without a template."""

    async def chat(self, messages: Messages, progress: Progress | None = None) -> Reply:
        """Asks the policy for the next message, and gives the answer as it was decoded.

        Args:
            progress: where what is asked and sampled can be seen, whatever becomes of the call.

        Raises:
            MaxTurnsReached: the trajectory has made all the calls that it may.
            ContextExceeded: the prompt leaves no room for an answer.
            TemplateRefused: the chat template does not accept the messages.
            EngineFault: the engine is broken.
        """
        call = ModelCall(list(messages))  # agents like to add to their own list
        turn, generation = await self._asked(call, None, progress)
        self._remember(turn, Reply.message_of(turn.raw))
        return Reply(text=turn.raw, finish_reason=generation.finish_reason)

    async def call(
        self, call: ModelCall, teller: Teller | None = None, progress: Progress | None = None
    ) -> ModelAnswer:
        """The same with tools, with reasoning and tool calls taken out of the answer, which ends before a stop text.

        Args:
            teller: tells the answer while it is sampled; then its own progress is the one that counts.

        Raises:
            StreamBroken: what was told has turned out wrong.
        """
        turn, generation = await self._asked(call, teller, progress)
        until, stop_text = found_in(turn.raw, call.stop) or (None, None)
        if call.prompt is None:
            turn.told = parsed(turn.raw[:until], self._template.source, _tool_names(call), turn.is_thinking)
        else:
            turn.told = Parsed(turn.raw[:until], None, ())
        turn.tool_calls = tuple(
            ToolCall(self._call_id(turn, place), name, arguments)
            for place, (name, arguments) in enumerate(turn.told.calls)
        )
        answer = ModelAnswer(
            content=turn.told.content,
            reasoning=turn.told.reasoning,
            tool_calls=turn.tool_calls,
            finish_reason=_reason(turn.tool_calls, generation),
            stop_text=stop_text,
            prompt_tokens=len(turn.prompt),
            response_tokens=len(generation.response_ids),
            response_ids=generation.response_ids,
            logprobs=generation.logprobs,
        )
        if teller is not None:
            try:
                teller.end(answer)
            except StreamBroken:
                self._turns.remove(turn)
                raise
        if call.prompt is None:
            self._remember(turn, answer.message)
        return answer

    def _check_form(self, call: ModelCall) -> None:
        if call.json_schema is None:
            return
        if not self._engine.takes_schemas:
            raise Unsupported(f"engine {self._engine.name} cannot keep answers to a JSON schema; engine vllm can")
        if call.tools:
            raise Unsupported("an answer that is kept to a JSON schema can call no tool; ask for one of both")

    async def _asked(
        self, call: ModelCall, teller: Teller | None, progress: Progress | None
    ) -> tuple[_Turn, Generation]:
        if self._max_turns is not None and len(self._turns) >= self._max_turns:
            raise MaxTurnsReached(f"trajectory {self._trajectory!r} has made its {self._max_turns} model calls")
        self._check_form(call)
        turn = self._next_turn(call)
        turn.is_thinking = turn.text[-_END:].rstrip().endswith("<think>")
        self._turns.append(turn)
        self._n_asked += 1
        text_of = self._template.decode
        if call.prompt is not None:
            text_of = partial(self._template.decode_after, turn.prompt.ids[-_TAIL:])
        progress = progress if teller is None else teller.progress
        if progress is not None:
            progress.ask(turn.prompt.ids, self._policy_id)
        request = GenerationRequest(
            turn.prompt.ids,
            turn.sampling,
            turn.seed,
            session=self._uid,
            text_of=text_of if call.stop else None,
            progress=progress,
        )
        if teller is not None:
            teller.begin(self._reading(call, turn, text_of))
        try:
            generation = await self._engine.generate(request)
            _check(generation, self._policy_id)
            if progress is not None:
                progress.begin(lambda: (generation.response_ids, generation.logprobs))
            self._answer(turn, generation, text_of)
            if isinstance(call.prompt, str):
                said = Written(call.prompt, turn.prompt, turn.sequence, turn.raw, text_of, turn.stop_id)
                self._written[said] = turn
        except BaseException:  # a call that nobody waited for counts for nothing
            self._turns.remove(turn)
            raise
        return turn, generation

    def _reading(self, call: ModelCall, turn: _Turn, text_of: TextOf) -> Reading:
        def text_after(before: np.ndarray, ids: np.ndarray) -> str:
            return self._template.decode_after(before, ids) if len(before) else text_of(ids)

        def told(text: str) -> tuple[str, str]:
            if call.prompt is not None:
                return "", text
            return sure(text, self._template.source, _tool_names(call), turn.is_thinking)

        return Reading(len(turn.prompt), text_after, told, turn.sampling.stop_token_ids, call.stop)

    def _call_id(self, turn: _Turn, place: int) -> str:
        return f"call_{_hash(f'{self._uid}/{self._trajectory}/{turn.seed}/{place}').hex()[:24]}"

    def steps(self) -> list[RecordedStep]:
        """The answered calls in the order in which they were made."""
        found: list[RecordedStep] = []
        before: _Turn | None = None
        for turn in self._turns:
            if turn.generation is None:
                continue
            if before is not None and turn.parent is before:
                prefix, messages = len(before.sequence), turn.new_messages
            else:
                prefix = 0 if before is None else common_prefix(before.sequence.ids, turn.prompt.ids)
                messages = turn.messages
            found.append(
                RecordedStep(
                    trajectory=self._trajectory,
                    step_index=len(found),
                    messages=messages,
                    response=turn.raw if turn.told is None else turn.told.content,
                    reasoning=None if turn.told is None else turn.told.reasoning,
                    tool_calls=turn.tool_calls,
                    prefix_length=prefix,
                    prompt_ids=turn.prompt.ids[prefix:],
                    prompt_tokens=len(turn.prompt),
                    generation=turn.generation,
                    sampling=turn.sampling,
                    seed=turn.seed,
                )
            )
            before = turn
        return found

    def _next_turn(self, call: ModelCall) -> _Turn:
        turn = self._next_in_chat(call) if call.prompt is None else self._next_written(call.prompt)
        room = self._engine.context_length - len(turn.prompt)
        if room < 1:
            raise ContextExceeded(
                f"the prompt has {len(turn.prompt)} tokens, and the policy's context of {self._engine.context_length} "
                "leaves no room for an answer"
            )
        turn.seed, turn.sampling = self._seed_of(call), self._sampling_of(call, room)
        return turn

    def _next_written(self, given: str | np.ndarray) -> _Turn:
        """Of a prompt that no template renders; recorded as what a user has said."""
        if not isinstance(given, str):
            if not 0 <= given.min() <= given.max() < self._template.n_ids:
                raise PromptRefused(f"the prompt has ids that are not below {self._template.n_ids}")
            messages = _as_said(self._template.decode_whole(given))
            return _Turn(None, messages, messages, TokenSequence().extended(given))
        messages = _as_said(given)
        known = continued(given, self._written, self._template)
        if known is None:
            return _Turn(None, messages, messages, TokenSequence().extended(self._template.encode_whole(given)))
        if known.whole is None:
            return _Turn(None, messages, messages, known.ids)
        return _Turn(self._written[known.whole], messages, _as_said(known.added) if known.added else [], known.ids)

    def _next_in_chat(self, call: ModelCall) -> _Turn:
        messages = call.messages
        before = self._read_before
        if before is not None and not before.known.begins(messages):
            before = None
        known = Known(0, [b""], hashlib.sha256()) if before is None else before.known
        keys = prefix_keys(messages[known.n :], known.keys)
        if not self._answered:
            text, ids = self._template.opening(messages, call.tools)
            turn = _Turn(None, messages, messages, TokenSequence().extended(ids), text=text)
        else:
            turn = (self._next_added(call, before, keys) if before else None) or self._next_whole(call, keys)
        turn.key = keys[-1]
        hasher = hasher_of(messages[known.n :], known.hasher)
        self._read_before = None
        if hasher is not None:
            self._read_before = _Read(Known(len(messages), keys, hasher), turn, _tools_of(call))
        return turn

    def _answers_in(self, keys: Sequence[bytes], first: int = 1) -> dict[int, _Turn]:
        """The policy's own answers in a conversation, by the number of messages up to and with each."""
        return {n: self._answered[keys[n]] for n in range(first, len(keys)) if keys[n] in self._answered}

    def _next_added(self, call: ModelCall, before: _Read, keys: Sequence[bytes]) -> _Turn | None:
        """Of a call that goes on with the answer to the call before; only the text of what is new is rendered."""
        known, parent, messages = before.known.n + 1, before.turn, call.messages
        if before.head is None or self._answers_in(keys, known) != {known: parent}:
            return None
        if before.tools is None or before.tools != _tools_of(call):
            return None
        answer = messages[known - 1] if parent.told is None else Reply.message_of(parent.raw)
        added = self._template.added(messages[0], [answer, *messages[known:]], call.tools)
        if added is None or not added.startswith(parent.raw):
            return None
        suffix = added[len(parent.raw) :]
        prompt = self._followed(parent, suffix)
        return _Turn(parent, messages, messages[known:], prompt, text=suffix, before=before.head)

    def _next_whole(self, call: ModelCall, keys: Sequence[bytes]) -> _Turn:
        messages, answers = call.messages, self._answers_in(keys)
        text = self._template.render(_as_sampled(messages, answers), call.tools)
        if answers:
            known = max(answers)
            length, digest = answers[known].head
            if len(text) >= length and _hash(text[:length]) == digest:  # else the template has rewritten what was said
                prompt = self._followed(answers[known], text[length:])
                return _Turn(answers[known], messages, messages[known:], prompt, text=text)
        return _Turn(None, messages, messages, TokenSequence().extended(self._template.encode(text)), text=text)

    def _followed(self, parent: _Turn, suffix: str) -> TokenSequence:
        """The parent's ids followed by those of the new text."""
        stop_id = parent.stop_id
        if stop_id is not None and suffix.startswith(closing := self._template.token_text(stop_id)):
            suffix = suffix[len(closing) :]
        else:
            stop_id = None
        return parent.sequence.extended(self._template.encode_after(stop_id, suffix))

    def _seed_of(self, call: ModelCall) -> int:
        if self._agent_samples and call.seed is not None:
            return seed_from(call.seed, call.choice)
        return seed_from(self._seed, self._trajectory, self._n_asked)

    def _sampling_of(self, call: ModelCall, room: int) -> SamplingParams:
        sampling = self._sampling
        if self._agent_samples:
            wishes = {name: getattr(call, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
            sampling = replace(sampling, **{name: wish for name, wish in wishes.items() if wish is not None})
        return replace(
            sampling, max_tokens=min(sampling.max_tokens, room), stop_texts=call.stop, json_schema=call.json_schema
        )

    def _answer(self, turn: _Turn, generation: Generation, text_of: TextOf) -> None:
        turn.generation = generation
        turn.sequence = turn.prompt.extended(generation.response_ids)
        n = len(generation.response_ids) - (turn.stop_id is not None)
        turn.raw = text_of(generation.response_ids[:n])
        head = turn.before or _Head()
        turn.before = None
        head = head.followed_by(turn.text + turn.raw)
        turn.head, turn.text = (head.length, head.hasher.digest()), ""
        if self._read_before is not None and self._read_before.turn is turn:
            self._read_before.head = head

    def _remember(self, turn: _Turn, answer: dict[str, Any]) -> None:
        """A later call that holds this answer, as the agent was given it, continues from it."""
        self._answered[key_after(turn.key, answer)] = turn


def _as_sampled(messages: Messages, answers: dict[int, _Turn]) -> Messages:
    """The messages with each of the policy's own answers as it was sampled, not as it was taken apart.

    Args:
        answers: by the number of messages up to and with the answer.
    """
    changed = {n - 1: Reply.message_of(turn.raw) for n, turn in answers.items() if turn.told is not None}
    return [changed.get(place, message) for place, message in enumerate(messages)] if changed else messages


def _tools_of(call: ModelCall) -> bytes | None:
    hasher = hasher_of(call.tools or [])
    return None if hasher is None else hasher.digest()


def _tool_names(call: ModelCall) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in call.tools or [])


def _as_said(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _reason(tool_calls: tuple[ToolCall, ...], generation: Generation) -> str:
    return "tool_calls" if tool_calls and generation.finish_reason == "stop" else generation.finish_reason


def _check(generation: Generation, policy_id: str) -> None:
    n_ids, n_logprobs = len(generation.response_ids), len(generation.logprobs)
    if n_ids == 0 or n_ids != n_logprobs:
        raise EngineFault(f"the engine gave {n_logprobs} logprobs for {n_ids} sampled tokens")
    if generation.policy_id != policy_id:
        raise EngineFault(f"policy {generation.policy_id[:12]} has answered, and {policy_id[:12]} was asked")


def prefix_keys(messages: Messages, before: Sequence[bytes] = (b"",)) -> list[bytes]:
    """A hash of the first 0, 1, … messages; ``before`` are those of messages that go before these."""
    keys = list(before)
    for message in messages:
        keys.append(key_after(keys[-1], message))
    return keys


def key_after(key: bytes, message: dict[str, Any]) -> bytes:
    """The key of a conversation that has ``key`` without its last message."""
    content = canonical_json(_identity(message)).encode()
    return hashlib.blake2b(key + content, digest_size=16).digest()


def _identity(message: dict[str, Any]) -> dict[str, Any]:
    """What counts of a message when it is compared: clients write an answer back with more or fewer empty fields."""
    if message.get("role") != "assistant":
        return message
    found: dict[str, Any] = {"role": "assistant", "content": text_of(message.get("content")) or ""}
    if message.get("tool_calls"):
        functions = [call["function"] for call in message["tool_calls"]]
        found["tool_calls"] = [[function["name"], _arguments(function["arguments"])] for function in functions]
    return found


def _arguments(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def _hash(text: str) -> bytes:
    return hashlib.blake2b(_in_bytes(text), digest_size=16).digest()


def _in_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
