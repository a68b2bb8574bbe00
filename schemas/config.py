"""The base of every config model: unknown keys are refused with the nearest known one.

A stage's ``Config`` holds what changes its output and enters the key; its ``Execution`` holds what
only changes how the work is done and never does.
"""

import difflib
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ConfigError


class ConfigModel(BaseModel):
    """A frozen model that refuses what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """``values`` as a ``model``, or one message that lists each wrong setting.

    Args:
        where: what is being read, for the message (a file name, ``"--set"``).
    Raises:
        ConfigError: with the dotted path of each wrong setting and, for an unknown key, the nearest known one.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [_explain(model, item) for item in error.errors()]
        raise ConfigError(
            f"{where}: " + ("; ".join(lines) if len(lines) < 3 else "\n  " + "\n  ".join(lines))
        ) from None


def nearest(word: str, known: Iterator[str] | list[str]) -> str:
    """``" Did you mean 'x'?"`` or the list of what is known; for messages about unknown names."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}? (known: {', '.join(names)})"
    return f"known: {', '.join(names)}"


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The config models that a field of this type can hold, also inside lists, unions and annotations."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType) or get_args(annotation):
        return [found for arg in get_args(annotation) for found in models_in(arg)]
    return []


def _explain(model: type[BaseModel], item: Any) -> str:
    path = [str(part) for part in item["loc"]]
    dotted = ".".join(path) or "(the whole config)"
    if item["type"] == "extra_forbidden":
        return f"unknown key {dotted!r}: {nearest(path[-1], _known_keys(model, path[:-1]))}"
    shown = f" (got {item['input']!r})" if item["type"] != "missing" and _is_short(item.get("input")) else ""
    return f"{dotted}: {item['msg'].removeprefix('Value error, ')}{shown}"


def _is_short(value: Any) -> bool:
    return len(repr(value)) < 80


def _known_keys(model: type[BaseModel], path: list[str]) -> list[str]:
    models = [model]
    for part in path:
        inner = [m for m in models if part in m.model_fields]
        if inner:
            models = [found for m in inner for found in models_in(m.model_fields[part].annotation)]
        # else: the tag of a discriminated union or an index, which names no field
    return sorted({name for m in models for name in m.model_fields})
