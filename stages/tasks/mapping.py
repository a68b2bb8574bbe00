"""Turns a row of a source into a task, as ``Fields`` says."""

import hashlib
import re
import string
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from schemas.canonical import canonical_hash, canonical_json
from schemas.errors import InputError
from stages.tasks.config import Extract, Fields, TasksConfig

Values = Mapping[str, Any]
TaskRow = dict[str, Any]


class Mapper:
    """Makes tasks out of rows; every complaint names the place and the column."""

    def __init__(self, config: TasksConfig, name: str):
        """
        Args:
            config: resolved, so that ``fields`` is given.
            name: what the source is called in messages.
        """
        fields = config.fields or Fields()
        self._name = name
        self._constant = {
            "benchmark": None if config.benchmark is None else PurePath(config.benchmark).stem,
            "split": config.split,
            "grader": config.grader,
            "agent": config.agent,
        }
        self._id = fields.id
        self._instruction = fields.instruction
        self._answer = fields.answer
        used = set().union(*(_columns(item) for item in (fields.id, fields.instruction, fields.answer)))
        self._metadata = _metadata_maker(fields.metadata, used)

    def task(self, place: str, row: Values) -> TaskRow:
        """The task in ``row``, by the columns of the ``tasks`` table.

        Raises:
            InputError: a column is missing, empty where it may not be, or has no JSON form.
        """
        try:
            instruction = _text(_value(self._instruction, row))
            if instruction is None:
                raise _Unusable(f"column {_named(self._instruction)} is null, and the instruction needs it")
            answer = None if self._answer is None else _text(_value(self._answer, row))
            metadata = self._metadata(row)
            metadata_json = canonical_json(metadata) if metadata else None
            if self._id is None:
                task_id: str | None = canonical_hash([instruction, answer, metadata_json])[:24]
            else:
                task_id = _text(_value(self._id, row))
                if not task_id:
                    raise _Unusable(f"column {_named(self._id)} is null or empty, and the task id needs it")
        except _Unusable as error:
            raise InputError(f"{self._name}, {place}: {error}") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"{self._name}, {place}: a value has no JSON form: {error}") from None
        return {
            "task_id": task_id,
            "instruction": instruction,
            "answer": answer,
            "metadata": metadata_json,
            **self._constant,
        }


def id_hash(task_id: str) -> int:
    """64 bits of a task id, so that a million ids are compared in eight megabytes."""
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "big")


class _Unusable(Exception):
    """What is wrong with a row; the mapper adds where."""


def _columns(item: str | Extract | None) -> set[str]:
    if item is None:
        return set()
    if isinstance(item, Extract):
        return {item.column}
    return {column for _, column in _pieces(item) if column is not None}


@lru_cache(maxsize=256)
def _pieces(template: str) -> list[tuple[str, str | None]]:
    return [(literal, column) for literal, column, _, _ in string.Formatter().parse(template)]


def _named(item: str | Extract) -> str:
    return " or ".join(repr(column) for column in sorted(_columns(item))) or "(none)"


def _value(item: str | Extract, row: Values) -> Any:
    """The value of a template or an extraction; None where a column it is made from is null."""
    if isinstance(item, Extract):
        column = _cell(item.column, row)
        if column is None:
            return None
        match = re.search(item.pattern, str(_text(column)))
        if match is None:
            raise _Unusable(f"column {item.column!r} holds nothing that matches {item.pattern!r}")
        return (match[1] if match.re.groups else match[0]).strip()
    pieces = _pieces(item)
    if len(pieces) == 1 and pieces[0][0] == "" and pieces[0][1] is not None:
        return _cell(pieces[0][1], row)
    texts = []
    for literal, name in pieces:
        texts.append(literal)
        if name is not None:
            text = _text(_cell(name, row))
            if text is None:
                return None
            texts.append(text)
    return "".join(texts)


def _cell(column: str, row: Values) -> Any:
    if column not in row:
        raise _Unusable(f"there is no column {column!r} (there are: {', '.join(map(str, row)) or 'none'})")
    return row[column]


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else canonical_json(value)


def _metadata_maker(metadata: Any, used: set[str]) -> Callable[[Values], Mapping[str, Any]]:
    if metadata == "*":
        return lambda row: {name: value for name, value in row.items() if name not in used}
    if isinstance(metadata, list):
        return lambda row: {name: _cell(name, row) for name in metadata}
    return lambda row: {name: _value(item, row) for name, item in metadata.items()}
