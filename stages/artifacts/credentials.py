"""Keeps credentials out of what is stored: a config that holds one is refused, execution settings are blanked."""

import re
from typing import Any

from schemas.errors import ConfigError

_IN_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/@\s]+@", re.IGNORECASE)
_IN_QUERY = re.compile(r"(?P<name>[?&][\w-]*(key|token|secret|password|signature)[\w-]*=)[^&\s]+", re.IGNORECASE)
_NAME = re.compile(
    r"(^|_)(api_?key|access_?key(_id)?|secret(_?key)?|password|passwd|auth_?token|credentials?)$", re.IGNORECASE
)


def refuse_credentials(values: Any, where: str, path: str = "") -> None:
    """Raises ConfigError where a setting is a credential or a URL that contains one."""
    for name, value in _items(values):
        inner = f"{path}.{name}" if path else str(name)
        if isinstance(value, dict | list | tuple):
            refuse_credentials(value, where, inner)
        elif isinstance(value, str) and value and _blanked(str(name), value) != value:
            raise ConfigError(
                f"{where}: {inner} holds a credential, and configs are stored",
                hint="give credentials through the environment",
            )


def redacted(values: Any) -> Any:
    """A copy with every credential replaced by ``***``."""
    if isinstance(values, list):
        return [redacted(value) if isinstance(value, dict | list) else _blanked("", value) for value in values]
    return {
        name: redacted(value) if isinstance(value, dict | list) else _blanked(name, value)
        for name, value in values.items()
    }


def _items(values: Any) -> Any:
    return values.items() if isinstance(values, dict) else enumerate(values)


def _blanked(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value and _NAME.search(name):
        return "***"
    return _IN_QUERY.sub(r"\g<name>***", _IN_URL.sub(r"\g<scheme>***@", value))
