"""Reads what a policy has written in its own format: reasoning between think tags, and calls of tools.

Three formats of tool calls are known, each by what the policy's chat template writes: that of Hermes and Qwen
(``<tool_call>{"name": …, "arguments": …}</tool_call>``), that of Llama 3 (the answer is one JSON object with ``name``
and ``parameters``), and that of Mistral (``[TOOL_CALLS]`` and a JSON list). What does not parse stays text.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_THINK = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
_OPEN_THINK = re.compile(r"\A\s*<think>(.*)\Z", re.DOTALL)
_THINK_MARK, _THINK_END = "<think>", "</think>"
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_HERMES_MARK, _HERMES_END = "<tool_call>", "</tool_call>"
_MISTRAL_MARK = "[TOOL_CALLS]"
_LLAMA_MARK = "<|python_tag|>"


@dataclass(frozen=True)
class Parsed:
    """An answer taken apart."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]
    """Name and arguments (JSON) of each call of a tool."""


def parsed(text: str, template: str, tool_names: frozenset[str], is_thinking: bool = False) -> Parsed:
    """An answer taken apart.

    Args:
        text: as decoded.
        template: source of the policy's chat template.
        tool_names: tools that the policy was offered; none: it is text, whatever it looks like.
        is_thinking: the prompt has opened the reasoning already.
    """
    reasoning, text = _without_reasoning(_opened(text, is_thinking))
    form = _form(template) if tool_names else None
    content, calls = form.read(text, tool_names) if form is not None else (text, ())
    return Parsed(content, reasoning, calls)


def sure(text: str, template: str, tool_names: frozenset[str], is_thinking: bool = False) -> tuple[str, str]:
    """Reasoning and content with which the answer begins, whatever follows; the arguments are those of ``parsed``."""
    text = _opened(text, is_thinking)
    begun = text.lstrip()
    if _THINK_MARK.startswith(begun):
        return "", ""
    if begun.startswith(_THINK_MARK) and _THINK_END not in begun:
        inner = begun[len(_THINK_MARK) :]
        return inner[: held_from(inner, (_THINK_END,))].strip(), ""
    reasoning, text = _without_reasoning(text)
    form = _form(template) if tool_names else None
    return reasoning or "", text if form is None else form.sure(text, tool_names)


def held_from(text: str, marks: Iterable[str]) -> int:
    """Where the end of a text begins that may become one of the marks; its length where it may not."""
    longest = 0
    for mark in marks:
        sizes = range(min(len(mark) - 1, len(text)), longest, -1)
        longest = next((size for size in sizes if text.endswith(mark[:size])), longest)
    return len(text) - longest


def _opened(text: str, is_thinking: bool) -> str:
    return _THINK_MARK + text if is_thinking else text


def _without_reasoning(text: str) -> tuple[str | None, str]:
    if found := _THINK.match(text):
        return found[1].strip(), text[found.end() :]
    if found := _OPEN_THINK.match(text):  # cut while it was thinking
        return found[1].strip(), ""
    return None, text


@dataclass(frozen=True)
class _Form:
    """How a policy writes calls of tools."""

    read: Callable[[str, frozenset[str]], tuple[str, tuple[tuple[str, str], ...]]]
    """Content and calls of an answer."""
    sure: Callable[[str, frozenset[str]], str]
    """With what the content begins, whatever follows."""


def _form(template: str) -> _Form | None:
    if _HERMES_MARK in template:
        return _Form(_hermes, _sure_hermes)
    if _MISTRAL_MARK in template:
        return _Form(_mistral, _sure_mistral)
    if _LLAMA_MARK in template or '"parameters"' in template:
        return _Form(_llama, _sure_llama)
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
    return "".join([*rest, text[end:]]).rstrip(), tuple(calls)


def _sure_hermes(text: str, names: frozenset[str]) -> str:
    end = 0
    while (begin := text.find(_HERMES_MARK, end)) >= 0:
        close = text.find(_HERMES_END, begin)
        if close < 0:
            break
        end = close + len(_HERMES_END)
    else:
        begin = held_from(text, (_HERMES_MARK,))
    return _hermes(text[:begin], names)[0].rstrip()


def _mistral(text: str, names: frozenset[str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    before, mark, listed = text.partition(_MISTRAL_MARK)
    if not mark:  # the mark is a special token, which decoding leaves out
        before, listed = "", text
    values = _loaded(listed.strip())
    calls = [_call(value) for value in values] if isinstance(values, list) and values else [None]
    known = [call for call in calls if call is not None]
    if len(known) < len(calls) or (not mark and not {name for name, _ in known} <= names):
        return text, ()
    return before.rstrip(), tuple(known)


def _sure_mistral(text: str, names: frozenset[str]) -> str:
    before, mark, _ = text.partition(_MISTRAL_MARK)
    if mark:
        return before.rstrip()
    return "" if text.lstrip()[:1] in ("", "[") else text[: held_from(text, (_MISTRAL_MARK,))].rstrip()


def _llama(text: str, names: frozenset[str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    calls = []
    for part in text.strip().removeprefix(_LLAMA_MARK).split(";\n"):
        call = _call(_loaded(part.strip()))
        if call is None or call[0] not in names:  # an answer may be JSON, too
            return text, ()
        calls.append(call)
    return "", tuple(calls)


def _sure_llama(text: str, names: frozenset[str]) -> str:
    begun = text.lstrip()
    return "" if begun[:1] in ("", "{") or begun.startswith(_LLAMA_MARK) or _LLAMA_MARK.startswith(begun) else text


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
