"""``/v1/responses``: the responses API, turned into the chat API's messages and back.

Nothing is kept between calls, so a request holds the whole conversation.
"""

import time
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
    refuse_other_logprobs,
    tools_in,
)
from stages.rollouts.gateway.json_form import schema_in
from stages.rollouts.gateway.stream import Stream, named_event
from stages.rollouts.sdk import Messages
from stages.rollouts.telling import Piece

_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")


class ResponsesApi(Api):
    """The responses API."""

    path = "/v1/responses"

    def asked(self, body: dict[str, Any]) -> Asked:
        for field in ("previous_response_id", "conversation", "prompt"):
            if body.get(field):
                raise ApiError(
                    400, f"{field}: nothing is kept here; send the whole conversation", param=field, code="unsupported"
                )
        refuse_other_logprobs(body)
        instructions = body.get("instructions")
        messages: Messages = (
            [{"role": "system", "content": _text(instructions, "instructions")}] if instructions else []
        )
        call = ModelCall(
            messages=[*messages, *_messages(body.get("input"))],
            tools=_tools(body),
            temperature=number_in(body, "temperature", 0, 100),
            top_p=number_in(body, "top_p", 1e-9, 1),
            max_tokens=count_of(body.get("max_output_tokens")),
            json_schema=schema_in(object_in(body, "text").get("format"), "text.format"),
        )
        return Asked(call, is_streamed=bool(body.get("stream")))

    def whole(self, asked: Asked, answers: list[ModelAnswer], told: Told) -> dict[str, Any]:
        (answer,) = answers
        return _response(told, _items(answer, told), answer)

    def stream(self, asked: Asked, told: Told) -> Stream:
        return ResponsesStream(asked, told)

    def refusal(self, error: ApiError) -> dict[str, Any]:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


class ResponsesStream(Stream):
    """Events of the responses API: one item after another, each begun, added to and ended."""

    def __init__(self, asked: Asked, told: Told):
        super().__init__(asked, told)
        self._n_events = 0
        self._done: list[dict[str, Any]] = []
        """Items that are finished."""
        self._open: dict[str, Any] | None = None
        """The item that is being written, with its text so far; None: none is."""

    def _more(self, place: int, piece: Piece) -> Iterator[str]:
        if place not in self._said:
            yield self._event("response.created", response=_response(self._told, [], None))
        if piece.reasoning:
            yield from self._in(_reasoning("", self._told))
            yield self._text(piece.reasoning)
        if piece.content:
            yield from self._in(_message("", self._told))
            yield self._text(piece.content)

    def _ended(self, place: int, answer: ModelAnswer) -> Iterator[str]:
        if not answer.content and not answer.tool_calls:
            yield from self._in(_message("", self._told))
        yield from self._closing()
        for call in answer.tool_calls:
            item, index = _function_call(call), len(self._done)
            at = {"output_index": index, "item_id": item["id"]}
            begun = item | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=index, item=begun)
            yield self._event("response.function_call_arguments.delta", **at, delta=call.arguments)
            yield self._event("response.function_call_arguments.done", **at, name=call.name, arguments=call.arguments)
            yield self._event("response.output_item.done", output_index=index, item=item)
            self._done.append(item)

    def _closed(self, answers: list[ModelAnswer]) -> Iterator[str]:
        (answer,) = answers
        end = "response.incomplete" if answer.finish_reason == "length" else "response.completed"
        yield self._event(end, response=_response(self._told, self._done, answer))

    def broken(self, error: ApiError) -> str:
        return self._event("error", message=error.message, code=error.code, param=error.param)

    def _in(self, item: dict[str, Any]) -> Iterator[str]:
        """Begins an item of text, unless one of its type is being written."""
        if self._open is not None and self._open["type"] == item["type"]:
            return
        yield from self._closing()
        self._open = item
        begun = item | {"content": [], "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=len(self._done), item=begun)
        yield self._event("response.content_part.added", **self._at(), part=item["content"][0])

    def _text(self, delta: str) -> str:
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += delta
        return self._event(f"response.{part['type']}.delta", **self._at(), delta=delta, logprobs=[])

    def _closing(self) -> Iterator[str]:
        if self._open is None:
            return
        item = self._open
        (part,) = item["content"]
        yield self._event(f"response.{part['type']}.done", **self._at(), text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **self._at(), part=part)
        yield self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open = None

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"output_index": len(self._done), "item_id": self._open["id"], "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        self._n_events += 1
        return named_event(kind, sequence_number=self._n_events - 1, **fields)


def _response(told: Told, items: list[dict[str, Any]], answer: ModelAnswer | None) -> dict[str, Any]:
    """The response object; without an answer, as it is when the work begins."""
    status, usage, cut = "in_progress", None, None
    if answer is not None:
        is_cut = answer.finish_reason == "length"
        status, cut = ("incomplete", {"reason": "max_output_tokens"}) if is_cut else ("completed", None)
        if answer.total_tokens is not None:
            usage = {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer.response_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.total_tokens,
            }
    return {
        "id": f"resp_{told.uid}",
        "object": "response",
        "created_at": int(time.time()),
        "model": told.model,
        "status": status,
        "output": items,
        "usage": usage,
        "error": None,
        "incomplete_details": cut,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
    }


def _items(answer: ModelAnswer, told: Told) -> list[dict[str, Any]]:
    items = [_reasoning(answer.reasoning, told)] if answer.reasoning else []
    if answer.content or not answer.tool_calls:
        items.append(_message(answer.content, told))
    return items + list(map(_function_call, answer.tool_calls))


def _reasoning(text: str, told: Told) -> dict[str, Any]:
    thought = {"type": "reasoning_text", "text": text}
    return {"id": f"rs_{told.uid}", "type": "reasoning", "summary": [], "content": [thought]}


def _message(text: str, told: Told) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"id": f"msg_{told.uid}", "type": "message", "role": "assistant", "content": [part]}
    return message | {"status": "completed"}


def _function_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _messages(given: Any) -> Messages:
    """Items as messages: an answer and the calls of tools after it are one message of the chat API."""
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, "input must be a text or a list of one item or more", param="input")
    messages: Messages = []
    for place, item in enumerate(given):
        where = f"input[{place}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and item.get("role") in _ROLES:
            messages.append({"role": item["role"], "content": _text(item.get("content"), f"{where}.content")})
        elif kind == "function_call":
            if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
                raise ApiError(400, f"{where} must have a name and arguments", param=where)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output})
        elif kind != "reasoning":  # what was thought is in the ids that the prompt continues from
            raise ApiError(400, f"{where} is no message, function_call or function_call_output", param=where)
    return messages


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or any(
        not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str)
        for part in content
    ):
        raise ApiError(400, f"{where} must be a text or a list of parts of type text", param=where)
    return "\n".join(part["text"] for part in content)


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = tools_in(body)
    for place, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise ApiError(400, f"tools[{place}] must be a function with a name", param=f"tools[{place}]")
    if not are_tools_offered(body.get("tool_choice"), [tool["name"] for tool in tools], ["required"]):
        return None
    fields = ("name", "description", "parameters")
    return [
        {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name) is not None}}
        for tool in tools
    ]
