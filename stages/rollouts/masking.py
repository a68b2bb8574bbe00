"""Keeps secrets out of what is stored: what an agent returns, raises or prints may hold a key of this machine."""

import os
import re
from collections.abc import Iterable

_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
SHORTEST = 8
"""Characters of a value that is taken for a secret; shorter ones stand in ordinary text."""
MASK = "***"


class Masker:
    """Replaces secrets: those given, and the values of environment variables whose names say that they are one."""

    def __init__(self, secrets: Iterable[str] = ()):
        from_environment = (value for name, value in os.environ.items() if _SECRET_NAME.search(name))
        found = {value for value in (*secrets, *from_environment) if len(value) >= SHORTEST}
        self._secrets = sorted(found, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, MASK)
        return text
