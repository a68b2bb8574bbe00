"""Canonical JSON and the hashes built on it.

One value has exactly one byte form, so equal work has an equal key. What has no stable form
(sets, callables, NaN, naive datetimes, unknown objects) is refused instead of guessed.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel


def canonical_json(value: Any) -> str:
    """The one JSON form of ``value``: keys sorted, no white space, UTF-8, floats in shortest form.

    Raises:
        TypeError: for what has no stable form; the message names the path inside ``value``.
    """
    text = json.dumps(_plain(value, "$"), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"$: {error.object[error.start]!r} is half a character and has no UTF-8 form") from None
    return text


def canonical_hash(value: Any) -> str:
    """SHA-256 of ``canonical_json(value)``, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def seed_from(*parts: Any) -> int:
    """A seed in ``[0, 2**63)`` that depends on every part and on nothing else."""
    return int(canonical_hash(parts)[:16], 16) >> 1


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return _plain(value.value, path)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{path}: {value!r} has no canonical JSON form")
        return value
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise TypeError(f"{path}: a datetime without a time zone has no canonical JSON form")
        return value.astimezone(UTC).isoformat(timespec="microseconds")
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="python"), path)
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path}: the key {key!r} is not a string")
            plain[key] = _plain(item, f"{path}.{key}")
        return plain
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{path}: {type(value).__name__} has no canonical JSON form")
