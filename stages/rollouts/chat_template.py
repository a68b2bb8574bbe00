"""Text on one side, token ids on the other: the policy's tokenizer with its own chat template.

Rendering and encoding are separate steps, so that a session can continue from sampled ids and encode
only the text that is new.
"""

import hashlib
import json
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from schemas.errors import InputError, RollmillError
from stages.rollouts.append_only import is_append_only
from stages.rollouts.checkpoint import end_token_ids, model_config
from stages.rollouts.sdk import Messages

Tools = list[dict[str, Any]] | None

_FILES = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", "special_tokens_map.json", "vocab*",
          "merges*", "added_tokens.json")  # fmt: skip
_ANSWER = "ANSWER"
_KEPT = 8
_LOADED: "dict[str, ChatTemplate]" = {}
"""By the content of the small files; the last few."""


class TemplateRefused(RollmillError):
    """The chat template does not accept a list of messages."""


class ChatTemplate:
    """Renders, encodes and decodes for one policy. Build with ``chat_template_in``."""

    def __init__(self, tokenizer: Any, end_ids: set[int], n_ids: int | None = None):
        self._tokenizer = tokenizer
        self.n_ids = len(tokenizer) if n_ids is None else n_ids
        """Ids of the policy are smaller than this."""
        self._turn = threading.Lock()
        if tokenizer.eos_token_id is not None:
            end_ids = end_ids | {tokenizer.eos_token_id}
        self._anchor = tokenizer.eos_token or ""
        self.stop_token_ids = tuple(sorted(end_ids | self._closing_ids()))
        """Ids that end an answer: as the model's files say, and the special token with which the template closes it."""
        self._is_append_only = is_append_only(self.source)
        self._opening = lru_cache(maxsize=512)(self._rendered_and_encoded)

    @property
    def source(self) -> str:
        """The template itself."""
        return str(self._tokenizer.chat_template)

    def opening(self, messages: Messages, tools: Tools = None) -> tuple[str, np.ndarray]:
        """The first prompt of a conversation as text and as ids; attempts at one task share the work."""
        return self._opening(_in_order(messages), None if tools is None else _in_order(tools))

    def render(self, messages: Messages, tools: Tools = None) -> str:
        """The prompt for the next answer, as text.

        Raises:
            TemplateRefused: the template does not accept these messages.
        """
        # A template that does not know the newer name of the system's role leaves such a message out, or refuses it.
        names = {} if "developer" in self.source else {"developer": "system"}
        try:
            shown = [_as_rendered(message, names) for message in messages]
            text: str = self._tokenizer.apply_chat_template(
                shown, tools=tools, add_generation_prompt=True, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise TemplateRefused(f"the policy's chat template does not accept these messages: {error}") from error
        return text

    def added(self, first: dict[str, Any], new: Messages, tools: Tools = None) -> str | None:
        """The text that new messages add to a rendered prompt; None where that is only known from the whole.

        Args:
            first: the conversation's first message, which is in the prompt.
            new: the answer to the prompt, and the messages after it.
        """
        if not self._is_append_only:
            return None
        before, _ = self.opening([first], tools)
        text = self.render([first, *new], tools)
        return text[len(before) :] if text.startswith(before) else None

    def encode(self, text: str) -> np.ndarray:
        """The ids of rendered text, int32. Nothing is added: the template has written what begins a sequence."""
        with self._turn:
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def encode_whole(self, text: str) -> np.ndarray:
        """The ids of a prompt that no template has rendered, with what the tokenizer puts before every text."""
        begin = self._tokenizer.bos_token
        with self._turn:
            is_begun = bool(begin) and text.startswith(begin)
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=not is_begun), dtype=np.int32)

    def encode_after(self, token_id: int | None, text: str) -> np.ndarray:
        """The ids of text that follows a special token (the usual end of an answer where None is given)."""
        anchor = self._anchor if token_id is None else self.token_text(token_id)
        ids = self.encode(anchor + text)
        if anchor and len(ids) and self.token_text(int(ids[0])) == anchor:
            return ids[1:]
        return self.encode(text)

    def decode(self, ids: np.ndarray) -> str:
        """The text of sampled ids, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def decode_after(self, before: np.ndarray, ids: np.ndarray) -> str:
        """The text of sampled ids that go on with a text, whose last ids are ``before``: with the space between."""
        begin = self.decode(before)
        text = self.decode(np.concatenate([before, ids]))
        return text[len(begin) :] if text.startswith(begin) else self.decode(ids)

    def decode_whole(self, ids: np.ndarray) -> str:
        """The text of ids, special tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def token_text(self, token_id: int) -> str:
        """How a token is written in rendered text."""
        return self.decode_whole(np.array([token_id]))

    def token_id(self, text: str) -> int:
        """The id of a text that is one token.

        Raises:
            InputError: it is not.
        """
        ids = self.encode_after(None, text)
        if len(ids) != 1:
            raise InputError(f"the stop text {text!r} is {len(ids)} tokens of this policy, and only one can be a stop")
        return int(ids[0])

    def _rendered_and_encoded(self, messages_json: str, tools_json: str | None) -> tuple[str, np.ndarray]:
        text = self.render(json.loads(messages_json), None if tools_json is None else json.loads(tools_json))
        return text, self.encode(text)

    def _closing_ids(self) -> set[int]:
        messages = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
        except Exception:  # a template may refuse anything; then it tells no closing token
            return set()
        ids = self.encode_after(None, text.rpartition(_ANSWER)[2])
        special = {n for n, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        return {int(ids[0])} & special if len(ids) else set()


def chat_template_in(folder: Path) -> ChatTemplate:
    """The tokenizer and chat template of a policy; kept in memory for policies that share them.

    Raises:
        InputError: the policy has no tokenizer or no chat template, or they do not fit the model.
    """
    hasher = hashlib.sha256()
    for path in sorted({path for pattern in _FILES for path in folder.glob(pattern)}):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    content = hasher.hexdigest()
    if content not in _LOADED:
        while len(_LOADED) >= _KEPT:
            _LOADED.pop(next(iter(_LOADED)))
        _LOADED[content] = _loaded(folder)
    return _LOADED[content]


def _loaded(path: Path) -> ChatTemplate:
    from transformers import AutoTokenizer

    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError("the policy has no tokenizer (tokenizer.json)", hint="import the whole checkpoint folder")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"the policy's tokenizer cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise InputError(
            "the policy has no chat template",
            hint="put a chat_template.jinja into the checkpoint folder before importing it",
        )
    config = model_config(path)
    vocabulary = {**config, **config.get("text_config", {})}.get("vocab_size")
    if isinstance(vocabulary, int) and len(tokenizer) > vocabulary:
        raise InputError(f"the policy's tokenizer has {len(tokenizer)} ids, and its model only {vocabulary}")
    return ChatTemplate(tokenizer, end_token_ids(path), vocabulary if isinstance(vocabulary, int) else None)


def _in_order(value: Any) -> str:
    """JSON with the keys in the order in which they came, as templates write them so."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _as_rendered(message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The message as text models' templates expect it: content parts joined, arguments of tools as objects.

    Args:
        names: what roles are called in the template, where that is another name.
    """
    content = text_of(message.get("content"))
    if (role := message.get("role")) in names:
        message = {**message, "role": names[role]}
    message = message if content is message.get("content") else {**message, "content": content}
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def text_of(content: Any) -> Any:
    """The text of content parts; other content as it is.

    Raises:
        TemplateRefused: a part is no text.
    """
    if not isinstance(content, list):
        return content
    kinds = {part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content}
    if kinds - {"text"}:
        raise TemplateRefused(
            f"the policy takes text only, and a message has parts of type {', '.join(sorted(map(str, kinds)))}"
        )
    return "\n".join(part["text"] for part in content)


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call
