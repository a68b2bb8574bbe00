"""What an engine is: it holds one policy at a time and answers token ids with token ids.

Engines know nothing of text, messages, tasks or episodes. An in-process model, workers over HTTP and
a script all fit behind this interface.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from schemas.errors import InputError, RollmillError, StageFailed

if TYPE_CHECKING:
    import numpy as np

    from stages.rollouts.engines.progress import Progress
    from stages.rollouts.engines.stopping import TextOf

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass, applied after ``top_k``; 1 keeps all."""
    top_k: int | None = None
    """Candidates kept; None: no limit."""
    max_tokens: int = 256
    """Sampled tokens at most, a stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends after one of these; it is kept in the answer."""
    stop_texts: tuple[str, ...] = ()
    """Sampling also ends after the id with which the answer's text holds one of these; all sampled ids are kept."""
    json_schema: str | None = None
    """JSON of a schema: only what goes on to a text that fits it may be sampled. None: anything."""


@dataclass(frozen=True)
class GenerationRequest:
    """One model call."""

    prompt_ids: "np.ndarray"
    """int32, the full prompt; prompt and ``max_tokens`` together fit into the engine's context."""
    sampling: SamplingParams
    seed: int
    """With the same seed, prompt and sampling the same policy gives the same answer, whatever else is asked
    meanwhile (to the last few bits of the arithmetic)."""
    session: str = ""
    """Calls with the same session share a prefix, so an engine may keep them on one worker."""
    text_of: "TextOf | None" = field(default=None, repr=False, compare=False)
    """The text of sampled ids; given where there are ``stop_texts``."""
    progress: "Progress | None" = field(default=None, repr=False, compare=False)
    """Where the engine tells what it has sampled so far: if somebody reads along and it can, or if it knows anyway."""


@dataclass(frozen=True)
class Retry:
    """An answer to a call that did not come, so that the call was made again; nobody's fault but a worker's."""

    worker: str
    started_at: datetime
    """UTC."""
    kind: str
    """Class of the fault."""
    message: str


@dataclass(frozen=True)
class Generation:
    """The answer to one model call."""

    response_ids: "np.ndarray"
    """int32, the sampled ids, stop token included."""
    logprobs: "np.ndarray"
    """float32, natural-log probability of each sampled id, in the engine's ``logprob_mode``."""
    finish_reason: FinishReason
    policy_id: str
    """The policy that sampled."""
    worker: str | None
    """What answered; None: not known."""
    started_at: datetime
    """When the engine received the call, UTC."""
    latency_s: float
    """From then to the last token."""
    retries: tuple[Retry, ...] = ()
    """In the order in which they failed."""


@dataclass(frozen=True)
class Probe:
    """Fixed sequences with the logprobs that the trainer computed for them."""

    ids: "list[np.ndarray]"
    """int32, one array a sequence."""
    logprobs: "list[np.ndarray]"
    """float32, of ``ids[1:]`` each after all ids before it."""


@dataclass(frozen=True)
class PolicyFiles:
    """A policy on this machine's disk."""

    policy_id: str
    """Key of the policy artifact."""
    folder: Path
    """Hugging Face checkpoint; of an adapter, its base's. Its path is another one for another content."""
    probe: Probe = field(repr=False)
    adapter: Path | None = None
    """Folder of a LoRA adapter as PEFT writes it; None: the policy has weights of its own."""
    digest: str = ""
    """Of the policy artifact; an adapter's name at a server is made of it."""

    @property
    def adapter_name(self) -> str:
        """What a server calls the adapter: nothing else has this name, whatever was loaded before."""
        return f"policy-{self.digest or self.policy_id}"


class EngineFault(StageFailed):
    """The engine cannot answer any more; not the agent's fault, so no episode is recorded for it."""


class Unsupported(RollmillError):
    """What a call asks for cannot be done here."""


class SchemaRefused(RollmillError):
    """The engine knows no way to keep an answer to a JSON schema."""


class Engine(ABC):
    """Answers model calls. ``generate`` may be called from several threads and event loops at once."""

    name: str
    logprob_mode: str
    """``raw``: of the model's own distribution; ``processed``: after temperature, top-k and top-p."""
    takes_schemas = False
    """Whether it can keep answers to a JSON schema."""

    def __init__(self) -> None:
        self.policy_id: str | None = None
        """The policy that is loaded; None: none."""
        self._users = 0
        self._turn = threading.Condition()

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Tokens of prompt and answer together at most, for the loaded policy."""

    @property
    def broken(self) -> bool:
        """Whether it can never answer again, so that another one must be started."""
        return False

    def facts(self) -> dict[str, list[str]]:
        """What belongs into the artifact's summary, by name: versions of what samples outside this process."""
        return {}

    def load(self, policy: PolicyFiles) -> None:
        """Replaces the policy, and checks that the new one reproduces its probe.

        Raises:
            StageFailed: it does not, by how much; then no policy is loaded.
        """
        self.policy_id = None
        self._load(policy)
        self.policy_id = policy.policy_id

    @abstractmethod
    def _load(self, policy: PolicyFiles) -> None:
        """Does what ``load`` says; no call is in flight that anyone waits for."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> Generation:
        """Answers one call.

        Raises:
            EngineFault: the engine is broken.
        """

    @asynccontextmanager
    async def at_home(self) -> AsyncIterator[None]:
        """Calls from the running event loop may take less time as long as the block runs."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Ends processes and threads and frees memory; a second call does nothing."""

    @contextmanager
    def serving(self, policy: PolicyFiles) -> Iterator["Engine"]:
        """The engine with this policy, for as long as the block runs. Who wants another policy waits."""
        with self._turn:
            while self._users and self.policy_id != policy.policy_id:
                self._turn.wait()
            if self.policy_id != policy.policy_id:
                self.load(policy)
            self._users += 1
        try:
            yield self
        finally:
            with self._turn:
                self._users -= 1
                self._turn.notify_all()


def probe_error(found: "list[np.ndarray]", probe: Probe) -> float:
    """The largest absolute difference between an engine's logprobs and the trainer's; infinite where one is NaN."""
    import numpy as np

    if not probe.ids or any(len(ids) < 2 for ids in probe.ids):
        raise InputError("the policy's probe has no sequence of two tokens or more, so no engine can be checked")
    differences = np.concatenate([np.abs(a - b) for a, b in zip(found, probe.logprobs, strict=True)])
    return float(np.nan_to_num(differences, nan=np.inf, posinf=np.inf).max())


def refuse_probe(name: str, policy: PolicyFiles, error: float, tolerance: float) -> None:
    """Raises unless ``error`` is within ``tolerance``."""
    if error > tolerance:
        raise StageFailed(
            f"engine {name} does not reproduce the probe of policy {policy.policy_id[:12]}: its logprobs are off by up "
            f"to {error:.3g}, and {tolerance:.3g} is tolerated",
            hint="its weights did not load as stored, or its number format is coarser than the trainer's",
        )
