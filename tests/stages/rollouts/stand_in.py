"""A small real HTTP server that speaks vLLM's API for a model that is uniform over its vocabulary, and can fail in
every way in which servers fail. It stands in where a fault cannot be had from vLLM itself."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from stages.rollouts.engines.base import PolicyFiles, Probe

VOCABULARY = 50
CONTEXT = 64
LOGPROB = float(-np.log(VOCABULARY))


def uniform_policy(folder: Path, number: int = 0, shift: float = 0.0) -> PolicyFiles:
    """The policy that stand-ins serve; ``shift`` is added to all its logprobs, as if training had moved it."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}))
    (folder / "shift").write_text(str(shift))
    ids = [np.arange(3, 3 + n, dtype=np.int32) for n in (12, 5)]
    probe = Probe(ids, [np.full(len(one) - 1, LOGPROB + shift, dtype=np.float32) for one in ids])
    return PolicyFiles(f"{number:064x}", folder, probe)


def shift_of(folder: Path) -> float:
    """What the weights in a folder add to all logprobs."""
    return float((folder / "shift").read_text())


class StandIn:
    """Serves from a thread until ``close``. Attributes may be changed while it runs."""

    def __init__(
        self, vocabulary: int = VOCABULARY, context: int = CONTEXT, *, name: str = "base", port: int = 0
    ) -> None:
        self.name = name
        """Of the model that it serves."""
        self.vocabulary = vocabulary
        self.fault: str | None = None
        """How completions go wrong."""
        self.version = "0.32.0"
        self.shift = 0.0
        """Of its weights."""
        self.forced: float | None = None
        """What it tells for a token that was the only one allowed; None: the raw logprob."""
        self.reloads = True
        """Whether it takes new weights when it says that it does."""
        self.offers_reset = True
        self.takes_weights = True
        """Whether the call that changes them is there."""
        self.listed: Any = ...
        """What it says that it serves; ...: the truth."""
        self.speaks_tokens = False
        """Whether it has the token API, too."""
        self.takes_adapters = True
        self.adapters: dict[str, float] = {"an-adapter": 0.0}
        """What those that are loaded add to all logprobs, by name."""
        self.seconds = 0.0
        """That an answer takes."""
        self.slow_seeds: set[int] = set()
        self.slow_s = 30.0
        """That the answers to these take."""
        self.context = context
        self.asked: list[dict[str, Any]] = []
        """Bodies of all sampling calls."""
        self.events: list[str] = []
        self.running = 0
        self.most_running = 0
        self.broken_off = 0
        """Calls that the client gave up."""
        self.progress = 0
        self.looks = 0
        """How often it was asked for its metrics."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._in_loop(self._start(port))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop_listening(self) -> None:
        self._in_loop(self._runner.cleanup())

    def listen_again(self) -> None:
        self._in_loop(self._start(self.port))

    def close(self) -> None:
        self.stop_listening()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _in_loop(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self, port: int) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/version", self._version),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/load_lora_adapter", self._load_adapter),
                web.post("/reset_prefix_cache", self._reset),
                web.post("/collective_rpc", self._call),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _deaf(self) -> None:
        while self.fault == "deaf":
            await asyncio.sleep(0.02)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _health(self, request: web.Request) -> web.Response:
        await self._deaf()
        return web.Response(status=503 if self.fault == "dead" else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._deaf()
        waiting = max(0, self.running - 4)
        self.looks += 1
        lines = [
            "# HELP vllm:num_requests_running Number of requests.",
            f'vllm:num_requests_running{{engine="0",model_name="m"}} {float(self.running - waiting)}',
            f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {float(waiting)}',
            f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} {float(waiting)}',
            f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {float(self.progress)}',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _models(self, request: web.Request) -> web.Response:
        models: list[dict[str, Any]] = [
            {"id": self.name, "parent": None, "max_model_len": self.context},
            *[{"id": name, "parent": self.name, "max_model_len": self.context} for name in self.adapters],
        ]
        return web.json_response({"data": models if self.listed is ... else self.listed})

    async def _reset(self, request: web.Request) -> web.Response:
        self.events.append("reset")
        return web.json_response({"success": True}, status=200 if self.offers_reset else 404)

    async def _call(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.takes_weights:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.events.append(body["method"])
        if self.reloads:
            (folder,) = body["kwargs"].values()
            self.shift = shift_of(Path(folder))
        return web.json_response({"results": [None]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.takes_adapters:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.events.append(f"load {body['lora_name']}")
        self.adapters[body["lora_name"]] = shift_of(Path(body["lora_path"]))
        return web.Response(text="Success")

    async def _generate(self, request: web.Request) -> web.Response:
        if not self.speaks_tokens:
            return web.json_response({"error": {"message": "Scale-out endpoints are disabled."}}, status=403)
        body = await request.json()
        self.events.append("generate")
        asked = {"prompt": body["token_ids"], "model": body["model"], **body["sampling_params"]}
        answered = await self._answer(asked)
        assert answered.body is not None
        return web.json_response(_in_tokens(json.loads(bytes(answered.body))))  # type: ignore[arg-type]

    async def _completions(self, request: web.Request) -> web.Response:
        return await self._answer(await request.json())

    async def _answer(self, body: dict[str, Any]) -> web.Response:
        added = 0.0 if body["model"] == self.name else self.adapters[body["model"]]
        logprob = float(-np.log(self.vocabulary)) + self.shift + added
        if "prompt_logprobs" in body:
            told: list[Any] = [None, *[{str(token): {"logprob": logprob, "rank": 1}} for token in body["prompt"][1:]]]
            return web.json_response({"choices": [{"prompt_logprobs": told, "token_ids": [0]}]})
        if "allowed_token_ids" in body:
            logprob = logprob if self.forced is None else self.forced
            return web.json_response(_completion(body, body["allowed_token_ids"], logprob))
        self.asked.append(body)
        if self.fault == "refuses schemas" and "structured_outputs" in body:
            return web.json_response({"error": {"message": "this grammar is not supported"}}, status=400)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.slow_s if body["seed"] in self.slow_seeds else self.seconds)
            await self._deaf()
            while self.fault in ("stalled", "dead"):
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.broken_off += 1
            raise
        finally:
            self.running -= 1
        self.progress += 1
        return self._spoilt(_completion(body, answer_ids(body["seed"], body["max_tokens"], self.vocabulary), logprob))

    def _spoilt(self, told: dict[str, Any]) -> web.Response:
        choice = told["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]
        match self.fault:
            case "error":
                return web.Response(status=500, text="the engine is in pieces")
            case "refuses":
                return web.json_response({"error": {"message": "no such thing"}}, status=400)
            case "garbage":
                return web.Response(text="<html>it works!</html>", content_type="text/html")
            case "two choices":
                told["choices"] = [choice, choice]
            case "too few logprobs":
                logprobs["token_logprobs"].pop()
            case "too many logprobs":
                logprobs["token_logprobs"].append(-1.0)
            case "a missing logprob":
                logprobs["token_logprobs"][-1] = None
            case "no logprobs":
                choice["logprobs"] = None
            case "a padded logprob":
                logprobs["token_logprobs"][0] = -9999.0
            case "logprobs of other tokens":
                logprobs["tokens"][0] = f"token_id:{(ids[0] + 1) % self.vocabulary}"
            case "ids of another vocabulary":
                choice["token_ids"] = [self.vocabulary for _ in ids]
            case "text for ids":
                choice["token_ids"] = ["hello" for _ in ids]
            case "no ids":
                choice["token_ids"] = None
            case "too many ids":
                choice["token_ids"] = [*ids, 1]
            case "another prompt":
                choice["prompt_token_ids"] = [0, *choice["prompt_token_ids"]]
            case "an aborted answer":
                choice["finish_reason"] = "abort"
            case "a stop that is none":
                choice["finish_reason"] = "stop"
        return web.json_response(told)


def answer_ids(seed: int, max_tokens: int, vocabulary: int = VOCABULARY) -> list[int]:
    """What a stand-in samples."""
    ids: list[int] = np.random.Generator(np.random.Philox(key=seed)).integers(3, vocabulary, size=max_tokens).tolist()
    return ids


def _completion(body: dict[str, Any], ids: list[int], logprob: float) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": "",
        "prompt_token_ids": body["prompt"],
        "token_ids": ids,
        "finish_reason": "length",
        "logprobs": {"token_logprobs": [logprob] * len(ids), "tokens": [f"token_id:{token}" for token in ids]},
    }
    return {"choices": [choice]}


def _in_tokens(told: dict[str, Any]) -> dict[str, Any]:
    """The same answer in the form of the token API."""
    (choice,) = told["choices"]
    whole = {name: choice.pop(name, None) for name in ("prompt_token_ids", "prompt_logprobs")}
    if "logprobs" in choice:
        pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        choice["logprobs"] = {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]}
    return whole | {"choices": [choice]}
