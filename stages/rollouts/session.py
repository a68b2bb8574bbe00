"""A chat over an engine that speaks token ids, recorded exactly.

When new messages extend an earlier call and its answer, the prompt continues from the ids that were
sampled, and only the text after them is encoded. When they do not, or when the template renders the
answer differently from what was sampled, a new sequence starts. Nothing sampled is ever re-tokenised.
"""

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from schemas.canonical import canonical_json, seed_from
from schemas.errors import RollmillError
from stages.rollouts.chat_template import ChatTemplate, Messages
from stages.rollouts.engines.base import Engine, EngineFault, Generation, GenerationRequest, SamplingParams
from stages.rollouts.sdk import MaxTurnsReached, Reply
from stages.rollouts.sequence import TokenSequence, common_prefix


class ContextExceeded(RollmillError):
    """A prompt leaves no room for an answer."""


@dataclass(frozen=True)
class RecordedStep:
    """One finished model call, as the ``steps`` table has it."""

    trajectory: str
    step_index: int
    messages: Messages
    """Those that are new since the step before; all, where this one does not continue it."""
    response: str
    prefix_length: int
    prompt_ids: np.ndarray
    prompt_tokens: int
    """Tokens of the full prompt."""
    generation: Generation
    sampling: SamplingParams
    seed: int


@dataclass(eq=False)
class _Turn:
    parent: "_Turn | None"
    """The call that this one continues, id for id."""
    messages: Messages
    new_messages: Messages
    prompt: TokenSequence
    text: str
    """The rendered prompt."""
    seed: int
    sampling: SamplingParams
    generation: Generation | None = None
    """None: not answered."""
    sequence: TokenSequence = field(default_factory=TokenSequence)
    """Prompt and answer."""
    response: str = ""
    head: tuple[int, bytes] = (0, b"")
    """Length and hash of the rendered prompt with the answer; kept instead of the text."""

    @property
    def stop_id(self) -> int | None:
        """The stop token that was sampled; None: the answer was cut."""
        assert self.generation is not None
        return int(self.generation.response_ids[-1]) if self.generation.finish_reason == "stop" else None


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
    ):
        self._trajectory = trajectory
        self._template = template
        self._engine = engine
        self._policy_id = policy_id
        self._sampling = sampling
        self._max_turns = max_turns
        self._seed = seed
        self._uid = uid
        self._turns: list[_Turn] = []
        self._answered: dict[bytes, _Turn] = {}
        """By the hash of a call's messages with its answer."""

    async def chat(self, messages: Messages) -> Reply:
        """Asks the policy for the next message.

        Raises:
            MaxTurnsReached: the trajectory has made all the calls that it may.
            ContextExceeded: the prompt leaves no room for an answer.
            TemplateRefused: the chat template does not accept the messages.
            EngineFault: the engine is broken.
        """
        if self._max_turns is not None and len(self._turns) >= self._max_turns:
            raise MaxTurnsReached(f"trajectory {self._trajectory!r} has made its {self._max_turns} model calls")
        turn = self._next_turn(list(messages))  # agents like to add to their own list afterwards
        self._turns.append(turn)
        request = GenerationRequest(turn.prompt.ids, turn.sampling, turn.seed, session=self._uid)
        self._answer(turn, await self._engine.generate(request))
        generation = turn.generation
        assert generation is not None
        return Reply(text=turn.response, finish_reason=generation.finish_reason)

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
                    response=turn.response,
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

    def _next_turn(self, messages: Messages) -> _Turn:
        parent, new_messages, prompt = None, messages, None
        if not self._answered:
            text, ids = self._template.opening(messages)
            prompt = TokenSequence().extended(ids)
        else:
            text = self._template.render(messages)
            keys = _prefix_keys(messages)
            known = next((n for n in range(len(messages), 0, -1) if keys[n] in self._answered), None)
            if known is not None:
                parent, new_messages = self._answered[keys[known]], messages[known:]
                prompt = self._continued(parent, text)
            if prompt is None:
                parent, new_messages, prompt = None, messages, TokenSequence().extended(self._template.encode(text))
        room = self._engine.context_length - len(prompt)
        if room < 1:
            raise ContextExceeded(
                f"the prompt has {len(prompt)} tokens, and the policy's context of {self._engine.context_length} "
                "leaves no room for an answer"
            )
        return _Turn(
            parent=parent,
            messages=messages,
            new_messages=new_messages,
            prompt=prompt,
            text=text,
            seed=seed_from(self._seed, self._trajectory, len(self._turns)),
            sampling=replace(self._sampling, max_tokens=min(self._sampling.max_tokens, room)),
        )

    def _continued(self, parent: _Turn, text: str) -> TokenSequence | None:
        """The parent's ids followed by those of the new text; None where the template has rewritten what was said."""
        length, digest = parent.head
        if len(text) < length or _hash(text[:length]) != digest:
            return None
        suffix, stop_id = text[length:], parent.stop_id
        if stop_id is not None and suffix.startswith(closing := self._template.token_text(stop_id)):
            suffix = suffix[len(closing) :]
        else:
            stop_id = None
        return parent.sequence.extended(self._template.encode_after(stop_id, suffix))

    def _answer(self, turn: _Turn, generation: Generation) -> None:
        _check(generation, self._policy_id)
        turn.generation = generation
        turn.sequence = turn.prompt.extended(generation.response_ids)
        n = len(generation.response_ids) - (turn.stop_id is not None)
        turn.response = self._template.decode(generation.response_ids[:n])
        head = turn.text + turn.response
        turn.head, turn.text = (len(head), _hash(head)), ""
        self._answered[_prefix_keys([*turn.messages, Reply.message_of(turn.response)])[-1]] = turn


def _check(generation: Generation, policy_id: str) -> None:
    n_ids, n_logprobs = len(generation.response_ids), len(generation.logprobs)
    if n_ids == 0 or n_ids != n_logprobs:
        raise EngineFault(f"the engine gave {n_logprobs} logprobs for {n_ids} sampled tokens")
    if generation.policy_id != policy_id:
        raise EngineFault(f"policy {generation.policy_id[:12]} has answered, and {policy_id[:12]} was asked")


def _prefix_keys(messages: Messages) -> list[bytes]:
    """A hash of the first 0, 1, … messages."""
    keys = [b""]
    for message in messages:
        keys.append(hashlib.blake2b(keys[-1] + canonical_json(message).encode(), digest_size=16).digest())
    return keys


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
