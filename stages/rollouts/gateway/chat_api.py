"""``/v1/chat/completions``: requests as the chat API's clients write them, answers as they read them."""

import time
from collections.abc import Iterator
from typing import Any

from stages.rollouts.calls import ModelAnswer, ModelCall
from stages.rollouts.engines.progress import Tokens
from stages.rollouts.gateway.api import (
    Api,
    ApiError,
    Asked,
    Told,
    are_tools_offered,
    count_of,
    n_in,
    number_in,
    refuse_other_logprobs,
    stops_in,
    tools_in,
    usage_of,
    whole_in,
)
from stages.rollouts.gateway.json_form import schema_in
from stages.rollouts.gateway.stream import Stream, data_event, tokens_of
from stages.rollouts.telling import Piece

_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatApi(Api):
    """The chat API."""

    path = "/v1/chat/completions"

    def asked(self, body: dict[str, Any]) -> Asked:
        return _asked(body)

    def whole(self, asked: Asked, answers: list[ModelAnswer], told: Told) -> dict[str, Any]:
        return _whole(asked, answers, told)

    def stream(self, asked: Asked, told: Told) -> Stream:
        return ChatStream(asked, told)

    def refusal(self, error: ApiError) -> dict[str, Any]:
        return chat_refusal(error)


def _asked(body: dict[str, Any]) -> Asked:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of one message or more", param="messages")
    for place, message in enumerate(messages):
        _check_message(message, f"messages[{place}]")
    refuse_other_logprobs(body)
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    call = ModelCall(
        messages=[_plain(message) for message in messages],
        tools=_tools(body),
        temperature=number_in(body, "temperature", 0, 100),
        top_p=number_in(body, "top_p", 1e-9, 1),
        top_k=count_of(body.get("top_k")),
        max_tokens=count_of(most),
        seed=whole_in(body, "seed"),
        stop=stops_in(body, "stop"),
        json_schema=schema_in(body.get("response_format"), "response_format"),
    )
    options = body.get("stream_options") or {}
    return Asked(
        call=call,
        n=n_in(body),
        is_streamed=bool(body.get("stream")),
        with_usage=bool(options.get("include_usage")),
        with_logprobs=bool(body.get("logprobs")),
    )


def _whole(asked: Asked, answers: list[ModelAnswer], told: Told) -> dict[str, Any]:
    choices = [
        {
            "index": place,
            "message": _message(answer),
            "finish_reason": answer.finish_reason,
            "logprobs": _logprobs(tokens_of(answer), told) if asked.with_logprobs else None,
        }
        for place, answer in enumerate(answers)
    ]
    return _head(told, "chat.completion") | {"choices": choices, "usage": _usage(answers)}


class ChatStream(Stream):
    """Chunks of the chat API."""

    def __init__(self, asked: Asked, told: Told):
        super().__init__(asked, told)
        self._head = _head(told, "chat.completion.chunk")

    def _more(self, place: int, piece: Piece) -> Iterator[str]:
        if place not in self._said:
            yield self._event(place, {"role": "assistant", "content": ""})
        if piece.reasoning:
            yield self._event(place, {"reasoning_content": piece.reasoning})
        has_logprobs = self._asked.with_logprobs and len(piece.tokens[0]) > 0
        if piece.content or has_logprobs:
            logprobs = _logprobs(piece.tokens, self._told) if has_logprobs else None
            yield self._event(place, {"content": piece.content}, logprobs=logprobs)

    def _ended(self, place: int, answer: ModelAnswer) -> Iterator[str]:
        for index, call in enumerate(answer.tool_calls):
            yield self._event(place, {"tool_calls": [{"index": index, **call.as_message_part()}]})
        yield self._event(place, {}, answer.finish_reason)

    def _closed(self, answers: list[ModelAnswer]) -> Iterator[str]:
        if self._asked.with_usage:
            yield data_event(self._head | {"choices": [], "usage": _usage(answers)})
        yield "data: [DONE]\n\n"

    def broken(self, error: ApiError) -> str:
        return data_event(chat_refusal(error))

    def _event(self, place: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": place, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return data_event(self._head | {"choices": [choice]})


def chat_refusal(error: ApiError) -> dict[str, Any]:
    """A refusal in the form of the chat API."""
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _head(told: Told, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{told.uid}", "object": kind, "created": int(time.time()), "model": told.model}


def _message(answer: ModelAnswer) -> dict[str, Any]:
    message = answer.message
    if answer.tool_calls and not answer.content:
        message["content"] = None
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    return message


def _usage(answers: list[ModelAnswer]) -> dict[str, int] | None:
    return usage_of([answers[0].prompt_tokens], [answer.response_tokens for answer in answers])


def _logprobs(tokens: Tokens | None, told: Told) -> dict[str, Any] | None:
    if tokens is None:
        return None
    texts = list(map(told.token_text, tokens[0].tolist()))
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, tokens[1].tolist(), strict=True)
        ],
        "refusal": None,
    }


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ApiError(400, f"{where} must be an object whose role is one of {', '.join(_ROLES)}", param=where)
    content = message.get("content")
    if not isinstance(content, str | list) and not (message["role"] == "assistant" and content is None):
        raise ApiError(400, f"{where}.content must be a text or a list of parts", param=f"{where}.content")
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}.content may hold parts of type text only", param=f"{where}.content")
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" not in function:
            raise ApiError(400, f"{where}.tool_calls must name a function and its arguments", param=where)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without the empty fields that clients add."""
    kept = {name: value for name, value in message.items() if value is not None and value != []}
    return {"content": "", **kept} if message["role"] == "assistant" else kept


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = tools_in(body)
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools[{place}] must be a function with a name", param=f"tools[{place}]")
    names = [tool["function"]["name"] for tool in tools]
    return tools if are_tools_offered(body.get("tool_choice"), names, ["required"]) else None
