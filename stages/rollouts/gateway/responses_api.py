"""``/v1/responses``: the responses API, turned into the chat API's messages and back.

Nothing is kept between calls, so a request holds the whole conversation.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

from stages.rollouts.calls import ModelAnswer, ModelCall
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
from stages.rollouts.sdk import Messages

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

    def events(self, asked: Asked, answers: list[ModelAnswer], told: Told) -> Iterator[str]:
        (answer,) = answers
        number = iter(range(1_000_000))

        def event(kind: str, **fields: Any) -> str:
            data = {"type": kind, "sequence_number": next(number), **fields}
            return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"

        yield event("response.created", response=_response(told, [], None))
        items = _items(answer, told)
        for index, item in enumerate(items):
            at = {"output_index": index, "item_id": item["id"]}
            begun = item | {"content": []} if "content" in item else item | {"arguments": ""}
            yield event("response.output_item.added", output_index=index, item=begun | {"status": "in_progress"})
            if item["type"] == "message":
                (part,) = item["content"]
                yield event("response.content_part.added", **at, content_index=0, part=part | {"text": ""})
                yield event("response.output_text.delta", **at, content_index=0, delta=part["text"], logprobs=[])
                yield event("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
                yield event("response.content_part.done", **at, content_index=0, part=part)
            elif item["type"] == "function_call":
                said = {"name": item["name"], "arguments": item["arguments"]}
                yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
                yield event("response.function_call_arguments.done", **at, **said)
            yield event("response.output_item.done", output_index=index, item=item)
        end = "response.incomplete" if answer.finish_reason == "length" else "response.completed"
        yield event(end, response=_response(told, items, answer))

    def refusal(self, error: ApiError) -> dict[str, Any]:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


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
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"id": f"rs_{told.uid}", "type": "reasoning", "summary": [], "content": thought})
    if answer.content or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{told.uid}", "type": "message", "role": "assistant", "content": [part]}
        items.append(message | {"status": "completed"})
    return items + [
        {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in answer.tool_calls
    ]


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
