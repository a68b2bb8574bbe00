"""A small real HTTP server that speaks the chat API as other people's endpoints do: it wants a key, gives text and
usage, and no ids; and it can fail in every way in which they fail."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

KEY = "sk-endpoint-0123456789abcdef"
MODEL = "other/model-1"
Answer = dict[str, Any]


def refusal(status: int, message: str, *, code: str | None = None, **headers: str) -> web.Response:
    """An error as such servers write it."""
    told = {"error": {"message": message, "type": "error", "code": code}}
    return web.json_response(
        told, status=status, headers={name.replace("_", "-"): text for name, text in headers.items()}
    )


def text_answer(body: dict[str, Any]) -> Answer:
    """Answers with the sum that the last message asks for, where it asks for one."""
    said = str(body["messages"][-1]["content"]) if "messages" in body else str(body["prompt"])
    return answer_with({"role": "assistant", "content": _sum_in(said)})


def answer_with(message: dict[str, Any], reason: str = "stop", usage: bool = True) -> Answer:
    """An answer of the chat API."""
    told: Answer = {"id": "1", "object": "chat.completion", "created": 1, "model": MODEL}
    told["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
    return told | ({"usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}} if usage else {})


def _sum_in(said: str) -> str:
    words = said.replace("What is ", "").rstrip("?")
    try:
        first, operator, second = words.split(" ")[-3:]
        numbers = int(first), int(second)
    except ValueError:
        return "hello"
    return str({"+": sum(numbers), "-": numbers[0] - numbers[1], "*": numbers[0] * numbers[1]}[operator])


class EndpointServer:
    """Serves from a thread until ``close``. Attributes may be changed while it runs."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Answer] = text_answer
        self.faults: list[Callable[[], web.Response]] = []
        """What the next calls are answered with instead, one each."""
        self.fails: Callable[[dict[str, Any]], web.Response | None] = lambda body: None
        """What a call is answered with instead, for as long as it gives something."""
        self.seconds = 0.0
        """That an answer takes."""
        self.asked: list[dict[str, Any]] = []
        """Bodies of all calls that had the key and were answered."""
        self.times: list[float] = []
        """When calls came, answered or not."""
        self.keys: list[str] = []
        self.running = self.most_running = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self._serve), web.post("/v1/completions", self._serve)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]

    async def _serve(self, request: web.Request) -> web.Response:
        self.times.append(time.monotonic())
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.keys.append(key)
        body = await request.json()
        if key != KEY:
            return refusal(401, f"Incorrect API key provided: {key}", code="invalid_api_key")
        if body["model"] != MODEL:
            return refusal(404, f"The model {body['model']} does not exist", code="model_not_found")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        if self.faults:
            return self.faults.pop(0)()
        if (fault := self.fails(body)) is not None:
            return fault
        self.asked.append(body)
        told = self.answer(body)
        if request.path.endswith("/v1/completions"):
            (choice,) = told["choices"]
            choice["text"] = choice.pop("message")["content"]
        return web.Response(text=json.dumps(told), content_type="application/json")
