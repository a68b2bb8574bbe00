"""Settings of the endpoint engine: what changes the answers, and apart from it how it is asked."""

import os
import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from schemas.config import ConfigModel
from schemas.errors import ConfigError

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_CALLS = ("/chat/completions", "/completions", "/models")


def checked_url(url: str) -> str:
    """A base URL without the slash at its end.

    Raises:
        ConfigError: it is none, or holds what does not belong there, such as a key; which is not repeated.
    """
    parts = urlsplit(url)
    try:
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ConfigError("the base URL must be like https://host/v1")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError("the base URL may hold no user, key or question mark; the key stays in the environment")
    path = parts.path.rstrip("/")
    for call in _CALLS:
        path = path.removesuffix(call)
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"


class EndpointConfig(ConfigModel):
    """A model that someone serves behind an OpenAI-compatible API; it gives text, and neither ids nor logprobs."""

    type: Literal["endpoint"]
    base_url: str
    """Up to and with the version, such as ``https://host/v1``."""
    model: str = Field(min_length=1)
    """Its name there."""
    omit: list[Literal["temperature", "top_p", "max_tokens", "seed"]] = Field(default_factory=list)
    """Of what is not sent, because this model refuses it: its own default counts then."""
    token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the limit on an answer's tokens is called there."""

    _checked = field_validator("base_url")(checked_url)


class EndpointExecution(ConfigModel):
    """How the endpoint is asked."""

    key_env: str | None = None
    """Name of the environment variable that holds the key. None: no key is sent."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Calls begun in a minute at most, evenly spread. None: no limit."""
    max_concurrency: int = Field(default=16, ge=1)
    """Calls in flight. Both limits are of one process, and count all its shards together."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Until a call that was sent has its whole answer."""
    attempts: int = Field(default=5, ge=1)
    """At one call, where the endpoint cannot be reached, fails (5xx), or answers nonsense."""
    patience_s: float = Field(default=900.0, ge=0)
    """How long one call may wait in all because the endpoint says that it is asked too often (429, ``Retry-After``)."""

    @field_validator("key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and (len(name) > 100 or not _VARIABLE.fullmatch(name)):
            # No ValueError, whose message would repeat a key that was pasted here.
            raise ConfigError(
                "key_env must be the name of an environment variable, such as OPENAI_API_KEY, and no key itself"
            )
        return name


def key_of(execution: EndpointExecution) -> str | None:
    """The key, from the environment.

    Raises:
        ConfigError: the variable is not set.
    """
    if execution.key_env is None:
        return None
    key = os.environ.get(execution.key_env, "").strip()
    if not key:
        raise ConfigError(
            f"the environment variable {execution.key_env} holds no key for the endpoint",
            hint=f"set it (export {execution.key_env}=…), or name another one: rollouts.engine.key_env",
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"the environment variable {execution.key_env} holds characters that no key has")
    return key
