"""Settings of a gateway that runs alone, and of the stage that makes rollouts of what it has captured."""

from pydantic import Field, field_validator

from schemas.config import ConfigModel
from stages.rollouts.config import EngineConfig, Sampling, TransformersConfig
from stages.rollouts.endpoints.settings import EndpointConfig


class GatewayConfig(ConfigModel):
    """How the policy answers; as in the rollouts stage."""

    sampling: Sampling = Sampling()
    """How the policy samples."""
    agent_samples: bool = False
    """Whether a client chooses ``temperature``, ``top_p``, ``top_k``, ``max_tokens`` and ``seed`` itself. Else they are
    those of ``sampling`` and of the gateway's seed, whatever it sends."""
    max_turns: int | None = Field(default=None, ge=1)
    """Model calls of one trajectory at most. None: no limit."""
    engine: EngineConfig = TransformersConfig()
    """What samples."""

    @field_validator("engine")
    @classmethod
    def _serves_a_policy(cls, engine: EngineConfig) -> EngineConfig:
        if isinstance(engine, EndpointConfig):
            raise ValueError("the gateway serves a policy of the store, and an endpoint is none")
        return engine


class CaptureConfig(ConfigModel):
    """What was captured."""

    gateway: GatewayConfig = GatewayConfig()
    """Settings of the gateway that did it."""
    seed: int = 0
    """Seed of that gateway."""
    logprob_mode: str
    """Of its engine: ``raw`` or ``processed``."""
    content: str
    """Digest of the captured sessions."""


class CaptureExecution(ConfigModel):
    """Where it lies."""

    folder: str
    """Folder with a file for each session."""
    shard_sessions: int = Field(default=512, ge=1)
    """Sessions a shard."""
