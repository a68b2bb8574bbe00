"""``/v1/messages``: Anthropic's API, turned into the chat API's messages and back."""

import json
from collections.abc import Iterator
from typing import Any

from stages.rollouts.calls import ModelAnswer, ModelCall, ToolCall
from stages.rollouts.gateway.api import (
    Api,
    ApiError,
    Asked,
    Told,
    are_tools_offered,
    count_of,
    number_in,
    object_in,
    stops_in,
    tools_in,
)
from stages.rollouts.gateway.json_form import schema_in
from stages.rollouts.gateway.stream import Stream, named_event
from stages.rollouts.sdk import Messages
from stages.rollouts.telling import Piece

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class MessagesApi(Api):
    """Anthropic's API."""

    path = "/v1/messages"

    def asked(self, body: dict[str, Any]) -> Asked:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError(400, "messages must be a list of one message or more", param="messages")
        system = [{"role": "system", "content": _text(body["system"], "system")}] if body.get("system") else []
        for place, message in enumerate(messages):
            system += _chat_messages(message, f"messages[{place}]")
        call = ModelCall(
            messages=system,
            tools=_tools(body),
            temperature=number_in(body, "temperature", 0, 100),
            top_p=number_in(body, "top_p", 1e-9, 1),
            top_k=count_of(body.get("top_k")),
            max_tokens=count_of(body.get("max_tokens")),
            stop=stops_in(body, "stop_sequences"),
            json_schema=schema_in(object_in(body, "output_config").get("format"), "output_config.format"),
        )
        return Asked(call, is_streamed=bool(body.get("stream")))

    def whole(self, asked: Asked, answers: list[ModelAnswer], told: Told) -> dict[str, Any]:
        (answer,) = answers
        return _head(told) | {
            "content": _blocks(answer),
            **_end(answer),
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.response_tokens},
        }

    def stream(self, asked: Asked, told: Told) -> Stream:
        return MessagesStream(asked, told)

    def refusal(self, error: ApiError) -> dict[str, Any]:
        return _refusal(error)


class MessagesStream(Stream):
    """Events of Anthropic's API: one block after another, each begun, added to and ended."""

    def __init__(self, asked: Asked, told: Told):
        super().__init__(asked, told)
        self._n_blocks = 0
        self._open: str | None = None
        """Type of the block that is being written; None: none is."""

    def _more(self, place: int, piece: Piece) -> Iterator[str]:
        if place not in self._said:
            usage = {"input_tokens": piece.prompt_tokens, "output_tokens": 0}
            start = _head(self._told) | {"content": [], "stop_reason": None, "usage": usage}
            yield named_event("message_start", message=start)
        if piece.reasoning:
            yield from self._in({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.content:
            yield from self._in({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": piece.content})

    def _ended(self, place: int, answer: ModelAnswer) -> Iterator[str]:
        if not answer.content and not answer.tool_calls:
            yield from self._in({"type": "text", "text": ""})
        for call in answer.tool_calls:
            yield from self._closing()
            yield from self._in({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(_input(call))})
        yield from self._closing()

    def _closed(self, answers: list[ModelAnswer]) -> Iterator[str]:
        (answer,) = answers
        yield named_event("message_delta", delta=_end(answer), usage={"output_tokens": answer.response_tokens})
        yield named_event("message_stop")

    def broken(self, error: ApiError) -> str:
        return named_event(**_refusal(error))

    def _in(self, block: dict[str, Any]) -> Iterator[str]:
        """Begins a block, unless one of its type is being written."""
        if self._open != block["type"]:
            yield from self._closing()
            self._open = block["type"]
            yield named_event("content_block_start", index=self._n_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return named_event("content_block_delta", index=self._n_blocks, delta=delta)

    def _closing(self) -> Iterator[str]:
        if self._open is not None:
            yield named_event("content_block_stop", index=self._n_blocks)
            self._open = None
            self._n_blocks += 1


def _refusal(error: ApiError) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _head(told: Told) -> dict[str, Any]:
    return {"id": f"msg_{told.uid}", "type": "message", "role": "assistant", "model": told.model, "stop_sequence": None}


def _end(answer: ModelAnswer) -> dict[str, Any]:
    is_at_text = answer.stop_text is not None and answer.finish_reason == "stop"
    return {
        "stop_reason": "stop_sequence" if is_at_text else _STOP_REASONS.get(answer.finish_reason, "end_turn"),
        "stop_sequence": answer.stop_text,
    }


def _blocks(answer: ModelAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)} for call in answer.tool_calls
    ]


def _input(call: ToolCall) -> dict[str, Any]:
    """The arguments; here they must be an object, and what others' models write need not be one."""
    try:
        found = json.loads(call.arguments or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": call.arguments}


def _chat_messages(message: Any, where: str) -> Messages:
    """One message, as one or more of the chat API: results of tools are messages of their own there."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise ApiError(400, f"{where} must be an object whose role is user or assistant", param=where)
    content, role = message.get("content"), message["role"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(400, f"{where}.content must be a text or a list of blocks", param=f"{where}.content")
    known = {"text"} | ({"tool_result"} if role == "user" else {"tool_use", "thinking"})
    for block in content:
        if block.get("type") not in known:
            raise ApiError(400, f"{where}.content may hold blocks of type {', '.join(sorted(known))}", param=where)
    results = [
        {
            "role": "tool",
            "tool_call_id": str(block.get("tool_use_id")),
            "content": _text(block.get("content", ""), where),
        }
        for block in content
        if block["type"] == "tool_result"
    ]
    texts = [block for block in content if block["type"] == "text"]
    calls = [_call(block, where) for block in content if block["type"] == "tool_use"]
    if not texts and not calls and results:
        return results
    spoken = {"role": role, "content": _text(texts, where)} | ({"tool_calls": calls} if calls else {})
    return [*results, spoken]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise ApiError(400, f"{where}: a tool_use names a tool and has an object as its input", param=where)
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": str(block.get("id")), "type": "function", "function": function}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or any(
        not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str)
        for block in content
    ):
        raise ApiError(400, f"{where} must be a text or a list of blocks of type text", param=where)
    return "\n".join(block["text"] for block in content)


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = tools_in(body)
    for place, tool in enumerate(tools):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
            raise ApiError(400, f"tools[{place}] must have a name and an input_schema", param=f"tools[{place}]")
    if not are_tools_offered(body.get("tool_choice"), [tool["name"] for tool in tools], ["any"]):
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools
    ]
