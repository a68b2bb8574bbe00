"""Reads what a policy has written in its own format: reasoning between think tags, and calls of tools.

Three formats of tool calls are known, each by what the policy's chat template writes: that of Hermes and Qwen
(``<tool_call>{"name": …, "arguments": …}</tool_call>``), that of Llama 3 (the answer is one JSON object with ``name``
and ``parameters``), and that of Mistral (``[TOOL_CALLS]`` and a JSON list). What does not parse stays text.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_THINK = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_OPEN_THINK = re.compile(r"\A\s*<think>(.*)\Z", re.DOTALL)
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MISTRAL_MARK = "[TOOL_CALLS]"
_LLAMA_MARK = "<|python_tag|>"


@dataclass(frozen=True)
class Parsed:
    """An answer taken apart."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]
    """Name and arguments (JSON) of each call of a tool."""


def parsed(text: str, template: str, tool_names: frozenset[str]) -> Parsed:
    """An answer taken apart.

    Args:
        text: as decoded.
        template: source of the policy's chat template.
        tool_names: tools that the policy was offered; none: it is text, whatever it looks like.
    """
    reasoning, text = _without_reasoning(text)
    read = _reader(template) if tool_names else None
    content, calls = read(text, tool_names) if read is not None else (text, ())
    return Parsed(content, reasoning, calls)


def _without_reasoning(text: str) -> tuple[str | None, str]:
    if found := _THINK.match(text):
        return found[1].strip(), text[found.end() :]
    if found := _OPEN_THINK.match(text):  # cut while it was thinking
        return found[1].strip(), ""
    return None, text


_Reader = Callable[[str, frozenset[str]], tuple[str, tuple[tuple[str, str], ...]]]


def _reader(template: str) -> _Reader | None:
    if "<tool_call>" in template:
        return _hermes
    if _MISTRAL_MARK in template:
        return _mistral
    if _LLAMA_MARK in template or '"parameters"' in template:
        return _llama
    return None


def _hermes(text: str, names: frozenset[str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    calls, rest, end = [], [], 0
    for found in _HERMES.finditer(text):
        call = _call(_loaded(found[1]))
        if call is not None:
            calls.append(call)
            rest.append(text[end : found.start()])
            end = found.end()
    if not calls:
        return text, ()
    return "".join([*rest, text[end:]]).strip(), tuple(calls)


def _mistral(text: str, names: frozenset[str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    before, mark, listed = text.partition(_MISTRAL_MARK)
    if not mark:  # the mark is a special token, which decoding leaves out
        before, listed = "", text
    values = _loaded(listed.strip())
    calls = [_call(value) for value in values] if isinstance(values, list) and values else [None]
    known = [call for call in calls if call is not None]
    if len(known) < len(calls) or (not mark and not {name for name, _ in known} <= names):
        return text, ()
    return before.strip(), tuple(known)


def _llama(text: str, names: frozenset[str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    calls = []
    for part in text.strip().removeprefix(_LLAMA_MARK).split(";\n"):
        call = _call(_loaded(part.strip()))
        if call is None or call[0] not in names:  # an answer may be JSON, too
            return text, ()
        calls.append(call)
    return "", tuple(calls)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _call(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
