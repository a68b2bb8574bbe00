"""Names that become part of a path in the store: checked here, so that no name can leave it."""

import re

from schemas.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def checked_name(name: str, what: str = "name") -> str:
    """``name`` itself, if it is safe as one path segment of a store.

    Args:
        name: 1 to 128 characters: letters, digits, ``.``, ``_``, ``-``; a letter or digit first.
        what: what is named, for the message (``"run name"``).
    Raises:
        ConfigError: for anything else (a slash, ``..``, an ``=``, white space).
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{what} {name!r} cannot be used: it becomes a folder in the store",
            hint="use letters, digits, '.', '_' and '-', starting with a letter or digit (no '/', no '..')",
        )
    return name
