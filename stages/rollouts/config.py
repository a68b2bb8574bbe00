"""Settings of the rollouts stage.

What changes the samples is config; what only changes how they are made is execution.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from schemas.config import ConfigModel, nearest
from schemas.runner import RunnerConfig
from stages.rollouts.commands import CommandAgent
from stages.rollouts.endpoints.settings import EndpointConfig, EndpointExecution
from stages.rollouts.workers.settings import VllmConfig, VllmExecution


class Sampling(ConfigModel):
    """How the policy's next token is chosen."""

    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass, applied after ``top_k``; 1 keeps all."""
    top_k: int | None = Field(default=None, ge=1)
    """Candidates kept. None: no limit."""
    max_tokens: int = Field(default=256, ge=1)
    """Sampled tokens a model call at most; fewer where the policy's context ends, and then with finish reason
    ``length``."""
    stop: list[str] = Field(default_factory=list)
    """Texts that are one token of the policy each, at which an answer ends, besides the policy's own end tokens."""


class Batch(ConfigModel):
    """A part of the tasks: the ``index``-th batch of a stream in which each epoch holds every task once, shuffled."""

    size: int = Field(ge=1)
    """Tasks."""
    index: int = Field(default=0, ge=0)
    """Counts on over epochs; an epoch's last tasks that fill no batch wait for the next epoch."""


class FinishWhen(ConfigModel):
    """When a shard ends without its last attempts, which may take longer than all the others together.

    What is left has no episode, as if it had not been asked for; which attempts these are depends on how fast things
    went, so with this setting the samples are not the same each time.
    """

    share: float = Field(gt=0, le=1)
    """Of the attempts of a shard that must have finished."""
    per_group_min: int = Field(default=1, ge=0)
    """Attempts at each task that must have finished."""


class TransformersConfig(ConfigModel):
    """The in-process engine."""

    type: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of weights and activations."""


class ScriptedConfig(ConfigModel):
    """An engine without a model, for tests and for measuring all that is not sampling."""

    type: Literal["scripted"]
    replies: list[list[int]] = Field(default_factory=list)
    """Answers as token ids, chosen by the call's seed. Empty: ids drawn uniformly from the vocabulary."""
    n_tokens: int = Field(default=64, ge=1)
    """Length of a drawn answer."""


ENGINE_TYPES = ("transformers", "vllm", "scripted", "endpoint")


def _known_engine(value: Any) -> Any:
    kind = value.get("type", "transformers") if isinstance(value, dict) else getattr(value, "type", None)
    if kind not in ENGINE_TYPES:
        raise ValueError(f"unknown engine {kind!r}: {nearest(str(kind), list(ENGINE_TYPES))}")
    return {"type": kind, **value} if isinstance(value, dict) else value


EngineConfig = Annotated[
    Annotated[TransformersConfig | VllmConfig | ScriptedConfig | EndpointConfig, Field(discriminator="type")],
    BeforeValidator(_known_engine),
]


class RolePolicy(ConfigModel):
    """What answers the calls of some roles instead of the stage's own policy."""

    policy: str
    """A policy of the store, ``policy/KEY`` or ``RUN:policy``: it stays as it is while the stage's own is trained, and
    what it has sampled is not trained on."""
    engine: EngineConfig | None = None
    """What samples it. None: an engine with the stage's settings."""
    sampling: Sampling | None = None
    """How it samples. None: as the stage's own."""

    @model_validator(mode="after")
    def _samples_a_policy(self) -> "RolePolicy":
        if isinstance(self.engine, EndpointConfig):
            raise ValueError(
                "engine.type=endpoint asks a model that others serve, and a role has a policy of the store"
            )
        return self


class RolloutsConfig(ConfigModel):
    """What the rollouts are."""

    agent: str | CommandAgent | None = None
    """Built in (``single_turn``, ``react``, ``refine``, ``solver_judge``, ``debate``, ``environment``), or
    ``module:function`` or ``path/file.py:function``, or a program, as ``command``. None: the agent that each task names
    (built-in ones only), and ``single_turn`` where it names none."""
    agent_version: str | None = None
    """Version of the agent's code. None: filled in when the stage's settings are resolved."""
    agent_config: dict[str, Any] = Field(default_factory=dict)
    """The agent's own settings; it gets them as ``config.metadata``."""
    n: int = Field(default=1, ge=1, le=65_536)
    """Attempts at each task."""
    sampling: Sampling = Sampling()
    """How the policy samples."""
    batch: Batch | None = None
    """Which tasks. None: all."""
    agent_samples: bool = False
    """Whether an agent that calls over HTTP chooses ``temperature``, ``top_p``, ``top_k``, ``max_tokens`` and ``seed``
    itself. Else they are those of ``sampling`` and the stage's seeds, whatever it sends. The texts before which its
    answers end (``stop``) are always its own."""
    max_turns: int | None = Field(default=None, ge=1)
    """Model calls of one trajectory at most; one more ends the episode with status ``max_turns``. None: no limit."""
    episode_time_limit_s: float | None = Field(default=None, gt=0)
    """Wall time of an episode, seconds; then it ends with status ``timeout`` and keeps its finished calls. None: no
    limit."""
    finish_when: FinishWhen | None = None
    """When stragglers are left. None: never."""
    is_validation: bool = False
    """Told to the agent: the episodes are for evaluation."""
    engine: EngineConfig = TransformersConfig()
    """What samples. ``endpoint``: a model that others serve, instead of a policy."""
    roles: dict[str, RolePolicy] = Field(default_factory=dict)
    """Roles that another policy answers for, by name; ``*`` stands for any characters, as in ``critic-*``. A whole name
    counts before those with a ``*``, and of these the longest."""

    @model_validator(mode="after")
    def _roles_are_beside_a_policy(self) -> "RolloutsConfig":
        if self.roles and isinstance(self.engine, EndpointConfig):
            raise ValueError("roles: with engine.type=endpoint no role is answered by a policy of the store")
        return self

    @model_validator(mode="after")
    def _groups_can_be_filled(self) -> "RolloutsConfig":
        if self.finish_when is not None and self.finish_when.per_group_min > self.n:
            raise ValueError(f"finish_when.per_group_min is {self.finish_when.per_group_min}, and n only {self.n}")
        return self


class RolloutsExecution(ConfigModel):
    """How the rollouts are made."""

    agents: Literal["threads", "processes"] = "threads"
    """Where users' functions run. threads: async ones in the stage's event loop, others in a thread each. processes: in
    processes of their own, as many as there are episodes in flight; one that hangs is ended there with all that it has
    started, and one that crashes takes nothing with it. Programs (``agent.command``) always have one."""
    shard_tasks: int | None = Field(default=None, ge=1)
    """Tasks a shard. A finished shard is on the shelf and survives whatever comes. None: as many as make about 512
    episodes, so that each costs little beside its sampling."""
    max_concurrency: int = Field(default=256, ge=1)
    """Episodes in flight."""
    max_batch: int = Field(default=64, ge=1)
    """Sequences that the transformers engine samples at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of the transformers engine. auto: the GPU where there is one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the transformers engine. None: torch's default."""
    probe_tolerance: float = Field(default=1e-3, gt=0)
    """Largest absolute difference between the engine's and the trainer's logprobs of the policy's probe; float32
    reaches about 1e-6, bfloat16 about 1e-1."""
    runner: RunnerConfig = RunnerConfig()
    """Where shards are worked on."""
    vllm: VllmExecution = VllmExecution()
    """How the vLLM engine's workers are run."""
    endpoint: EndpointExecution = EndpointExecution()
    """How the endpoint engine's model is asked."""
    role_vllm: dict[str, VllmExecution] = Field(default_factory=dict)
    """How the workers of ``roles`` are run, by the same names; for those that are left out, as ``vllm`` says."""

    def of_role(self, name: str) -> "RolloutsExecution":
        """The same with the workers of one of ``roles``."""
        return self.model_copy(update={"vllm": self.role_vllm.get(name, self.vllm)})
