"""The gateway's HTTP server, in the event loop of the episodes that it serves.

Each episode is a session with an address and a key of its own, so that none can read or extend another's. It listens on
the loopback, unless a gateway that runs alone is told otherwise; that one has a desk, which opens sessions.
"""

import asyncio
import hmac
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import quote, unquote

from aiohttp import web

from schemas.errors import RollmillError
from stages.rollouts.calls import ModelAnswer, ModelCall
from stages.rollouts.chat_template import TemplateRefused
from stages.rollouts.engines.base import EngineFault, SchemaRefused, Unsupported
from stages.rollouts.gateway.api import Api, ApiError, Asked, Told
from stages.rollouts.gateway.chat_api import ChatApi
from stages.rollouts.gateway.completions_api import CompletionsApi
from stages.rollouts.gateway.messages_api import MessagesApi
from stages.rollouts.gateway.responses_api import ResponsesApi
from stages.rollouts.gateway.stream import Stream
from stages.rollouts.sdk import ROLE_HEADER, EpisodeClosed, MaxTurnsReached
from stages.rollouts.session import ContextExceeded
from stages.rollouts.telling import Piece, StreamBroken, Teller

MAX_BODY = 32 * 1024 * 1024
"""Bytes of a request at most."""
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
"""A surrogate that is written as an escape: with its other half it is a character, alone it cannot be encoded."""
_CHAT, _COMPLETIONS, _RESPONSES, _MESSAGES = ChatApi(), CompletionsApi(), ResponsesApi(), MessagesApi()
_REFUSALS: dict[type[RollmillError], tuple[int, str]] = {
    MaxTurnsReached: (400, "max_turns"),
    ContextExceeded: (400, "context_length_exceeded"),
    TemplateRefused: (400, "template_refused"),
    EpisodeClosed: (410, "session_closed"),
    Unsupported: (400, "unsupported"),
    SchemaRefused: (400, "invalid_json_schema"),
    EngineFault: (503, "engine_fault"),
    StreamBroken: (503, "stream_broken"),
}


class Calls(Protocol):
    """What a session does with a call."""

    async def call(self, trajectory: str, call: ModelCall, teller: Teller | None = None) -> ModelAnswer: ...

    def refused(self, trajectory: str, kind: str, message: str) -> None:
        """Notes a request that could not be made a call."""


class Desk(Protocol):
    """Who opens sessions for clients that nobody else has opened one for."""

    prefixes: tuple[str, ...]
    """What may stand before every address."""

    def admits(self, session: str, key: str) -> bool:
        """Whether this key opens the session; one that is not open yet is opened."""

    def routes(self, prefix: str) -> list[web.RouteDef]:
        """Addresses of its own."""


@dataclass(frozen=True)
class Endpoint:
    """Where one episode's calls go."""

    url: str
    """Up to and with the session."""
    api_key: str

    def base_url(self, role: str) -> str:
        """What a client is given for the calls of one trajectory."""
        return f"{self.url}/roles/{quote(role, safe='')}/v1"


@dataclass(frozen=True)
class _Session:
    calls: Calls
    api_key: str
    role: str
    at_work: set[asyncio.Task[Any]] = field(default_factory=set)
    """Calls that are not answered yet."""


class Gateway:
    """Serves from ``async with`` on. ``open`` may be called from any thread."""

    def __init__(
        self,
        model: str,
        token_text: Callable[[str], Callable[[int], str]],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        desk: Desk | None = None,
    ):
        """
        Args:
            model: name of the policy, which calls must give.
            token_text: given the role, how a token id is written.
            port: 0: any that is free.
            desk: None: there are the sessions that were opened with ``open``, and no others.
        """
        self._model = model
        self._token_text = token_text
        self._host, self._port, self._desk = host, port, desk
        self._sessions: dict[str, _Session] = {}
        self._url = ""

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._url

    async def __aenter__(self) -> "Gateway":
        app = web.Application(client_max_size=MAX_BODY)
        fronts = ("",) if self._desk is None else self._desk.prefixes
        for front in fronts:
            app.router.add_get(f"{front}/health", self._health)
            app.router.add_routes([] if self._desk is None else self._desk.routes(front))
        ends = ("/sessions/{session}", "/sessions/{session}/roles/{role}")
        for prefix in (front + end for front in fronts for end in ends):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            for api in (_CHAT, _COMPLETIONS, _RESPONSES):
                app.router.add_post(f"{prefix}{api.path}", partial(self._serve, api))
            # Anthropic's client adds /v1 to its base URL itself, the chat API's has it in there.
            for address in (_MESSAGES.path, f"/v1{_MESSAGES.path}"):
                app.router.add_post(f"{prefix}{address}", partial(self._serve, _MESSAGES))
        app.router.add_route("*", "/{rest:.*}", self._unknown)
        # A client that hangs up takes its call back: the answer would be nobody's.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=4096)
        await site.start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._url = f"http://{host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def open(self, uid: str, calls: Calls, role: str, api_key: str | None = None) -> Endpoint:
        """Takes calls for a session from now on.

        Args:
            role: name of the trajectory of calls that name none.
            api_key: None: a new one.
        """
        api_key = api_key or secrets.token_urlsafe(24)
        self._sessions[uid] = _Session(calls, api_key, role)
        return Endpoint(f"{self._url}/sessions/{uid}", api_key)

    def close(self, uid: str) -> None:
        """Takes no more, and gives up those that are not answered. To be called in the gateway's event loop."""
        session = self._sessions.pop(uid, None)
        for task in list(session.at_work) if session else []:
            task.cancel()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions)})

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except ApiError as error:
            return _refused(_CHAT, error)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rollmill"}
        return web.json_response({"object": "list", "data": [model]})

    async def _unknown(self, request: web.Request) -> web.Response:
        error = ApiError(404, f"the gateway has no {request.method} {request.path}", code="unknown_url")
        return _refused(_CHAT, error)

    async def _serve(self, api: Api, request: web.Request) -> web.StreamResponse:
        try:
            session, role = self._session(request)
            try:
                asked = api.asked(await self._body(request))
            except ApiError as refusal:
                session.calls.refused(role, refusal.code or "ApiError", refusal.message)
                raise
            told = Told(self._model, secrets.token_hex(12), self._token_text(role))
            if asked.is_streamed:
                return await self._stream(request, api.stream(asked, told), session, role, asked)
            answers = await self._answers(session, role, asked)
        except ApiError as error:
            return _refused(api, error)
        except RollmillError as error:
            return _refused(api, _as_refusal(error))
        return web.json_response(api.whole(asked, answers, told))

    async def _stream(
        self, request: web.Request, events: Stream, session: _Session, role: str, asked: Asked
    ) -> web.StreamResponse:
        """Sends an answer while it is sampled. What is refused before that is raised, and so refused as other calls."""
        pieces: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()
        answering = asyncio.ensure_future(
            self._answers(session, role, asked, lambda place, piece: pieces.put_nowait((place, piece)))
        )
        answering.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            piece = await pieces.get()
            if piece is None:
                answering.result()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            while piece is not None:
                await response.write("".join(events.piece(*piece)).encode())
                piece = await pieces.get()
            try:
                end = "".join(events.end(answering.result()))
            except RollmillError as error:
                end = events.broken(_as_refusal(error))
            except asyncio.CancelledError:
                end = events.broken(ApiError(410, "the episode has ended", code="session_closed"))
            await response.write(end.encode())
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client has hung up: nobody gets what is returned here
        finally:
            answering.cancel()
        return response

    async def _answers(
        self, session: _Session, role: str, asked: Asked, tell: Callable[[int, Piece], None] | None = None
    ) -> list[ModelAnswer]:
        task = asyncio.current_task()
        assert task is not None
        session.at_work.add(task)
        choices = [replace(call, choice=place) for call in (asked.call, *asked.more) for place in range(asked.n)]
        tellers = [None if tell is None else Teller(partial(tell, place)) for place in range(len(choices))]
        calls = [
            asyncio.ensure_future(session.calls.call(role, choice, teller))
            for choice, teller in zip(choices, tellers, strict=True)
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            session.at_work.discard(task)
            for call in calls:  # where one has failed, nobody waits for the others
                call.cancel()

    def _session(self, request: web.Request) -> tuple[_Session, str]:
        uid, given = request.match_info["session"], key_in(request)
        session = self._sessions.get(uid)
        if session is None or not same_key(given, session.api_key):
            is_admitted = self._desk is not None and self._desk.admits(uid, given)
            session = self._sessions[uid] if is_admitted else None
        # One answer for both, so that no one learns which sessions there are.
        if session is None:
            raise ApiError(401, "no session of this name is open with this key", code="invalid_api_key")
        role = unquote(request.match_info["role"]) if "role" in request.match_info else session.role
        role = request.headers.get(ROLE_HEADER, role)
        if not 1 <= len(role) <= 128:
            raise ApiError(400, "a role is a name of 1 to 128 characters", param="role")
        return session, role

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = await body_of(request)
        if body.get("model") != self._model:
            raise ApiError(
                404,
                f"there is no model {body.get('model')!r}; this policy is {self._model!r} (config.model)",
                code="model_not_found",
                param="model",
            )
        return body


async def body_of(request: web.Request) -> dict[str, Any]:
    """The object in a request.

    Raises:
        ApiError: it is none, or too large.
    """
    try:
        text = await request.read()
        body = json.loads(text)
        if _HALF_CHARACTER.search(text):
            json.dumps(body, ensure_ascii=False).encode()
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"a request may have {MAX_BODY:,} bytes", code="request_too_large") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the request has half of a character in it", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request is no JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the request must be a JSON object", code="invalid_json")
    return body


def key_in(request: web.Request) -> str:
    """The key that a request comes with."""
    in_address = request.match_info.get("key")
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return in_address or request.headers.get("X-Api-Key") or bearer


def same_key(given: str, expected: str) -> bool:
    """Compares without telling, by the time that it takes, how much is the same."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def _as_refusal(error: RollmillError) -> ApiError:
    status, code = _REFUSALS.get(type(error), (400, "refused"))
    return ApiError(status, str(error), code=code)


def _refused(api: Api, error: ApiError) -> web.Response:
    return web.json_response(api.refusal(error), status=error.status)
