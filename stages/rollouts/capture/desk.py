"""The addresses of a gateway that runs alone: sessions are opened, looked at, ended and committed here.

The run's token opens everything; a session's own key opens that session only. The token may also stand in the address
(``/rllm/TOKEN/…``), for clients that can be given nothing but an address, as rLLM's.
"""

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from aiohttp import web
from pydantic import Field, ValidationError

from schemas.config import ConfigModel
from schemas.errors import RollmillError
from stages.rollouts.capture.sessions import CapturedSession
from stages.rollouts.capture.traces import traces_of
from stages.rollouts.gateway.api import ApiError
from stages.rollouts.gateway.chat_api import ChatApi
from stages.rollouts.gateway.server import body_of, key_in, same_key

_IN_ADDRESS = "/rllm/{key}"
_Answer = Callable[[web.Request], Awaitable[Any]]


class AskedTask(ConfigModel):
    """The task that a session attempts."""

    id: str | None = Field(default=None, min_length=1, max_length=256)
    """Attempts at tasks with the same id are compared with each other. None: a hash of the instruction and answer."""
    instruction: str | list[dict[str, Any]] | None = None
    """None: what the user says first."""
    answer: str | None = None
    """What a grader compares with."""
    metadata: dict[str, Any] = Field(default_factory=dict)


class AskedSession(ConfigModel):
    """A session to be opened."""

    session_id: str | None = Field(default=None, min_length=1, max_length=256, pattern=r"^[^/\x00-\x1f\x7f]+$")
    """None: a new name."""
    task: AskedTask | None = None
    """None: what the user says first is the task."""
    role: str = Field(default="default", min_length=1, max_length=128)
    """Name of the trajectory of calls that name none."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """The client's own notes, kept with the episode's artifacts."""


class AskedEnd(ConfigModel):
    """How a session ends."""

    error: str | None = None
    """Why it failed. None: it did not."""
    artifacts: dict[str, Any] | None = None
    """What the episode has made; graders get it."""


class Sessions(Protocol):
    """The sessions behind the desk."""

    policy: str
    """Reference of the policy."""

    def open(self, asked: AskedSession) -> CapturedSession:
        """A new session, or the one of this name that is open.

        Raises:
            RollmillError: the one of this name attempts another task, or another task has this id.
        """

    def find(self, name: str) -> CapturedSession | None:
        """An open one; None: there is none of this name."""

    def all(self) -> list[CapturedSession]:
        """Those that are open, in the order in which they were opened."""

    def end(self, session: CapturedSession, asked: AskedEnd) -> None:
        """Takes no more calls for it."""

    async def commit(self) -> tuple[str | None, int]:
        """Puts what has ended into the store: the reference of the rollouts (None: nothing has), and episodes."""

    def workers(self) -> list[tuple[str, bool]]:
        """Name of each of the engine's workers, and whether it serves."""


class CaptureDesk:
    """Routes, and who may use them."""

    prefixes: tuple[str, ...] = ("", _IN_ADDRESS)

    def __init__(self, sessions: Sessions, token: str, model: str):
        self._sessions = sessions
        self._token = token
        self._model = model

    def key_of(self, session: str) -> str:
        """A session's own key: it is the same again where the token is."""
        return hmac.new(self._token.encode(), session.encode(), hashlib.sha256).hexdigest()

    def admits(self, session: str, key: str) -> bool:
        """The token opens a session on first use; a session's own key does not open it again once it has ended."""
        if not same_key(key, self._token):
            return False
        self._sessions.open(_validated(AskedSession, {"session_id": session}))
        return True

    def routes(self, prefix: str) -> list[web.RouteDef]:
        one = prefix + "/sessions/{session}"
        return [
            web.get(f"{prefix}/v1/models", partial(_answered, self._models)),
            web.post(f"{prefix}/sessions", partial(_answered, self._open)),
            web.get(f"{prefix}/sessions", partial(_answered, self._list)),
            web.get(one, partial(_answered, self._look)),
            web.get(f"{one}/traces", partial(_answered, self._traces)),
            web.post(f"{one}/end", partial(_answered, self._end)),
            web.delete(one, partial(_answered, self._delete)),
            web.get(f"{prefix}/traces/{{trace}}", partial(_answered, self._trace)),
            web.post(f"{prefix}/commit", partial(_answered, self._commit)),
            web.get(f"{prefix}/admin/workers", partial(_answered, self._workers)),
            web.post(f"{prefix}/admin/workers", partial(_answered, self._no_workers)),
            web.delete(f"{prefix}/admin/workers/{{worker}}", partial(_answered, self._no_workers)),
            web.post(f"{prefix}/admin/flush", partial(_answered, self._flush)),
        ]

    async def _models(self, request: web.Request) -> Any:
        self._need_token(request)
        return {
            "object": "list",
            "data": [{"id": self._model, "object": "model", "created": 0, "owned_by": "rollmill"}],
        }

    async def _open(self, request: web.Request) -> Any:
        self._need_token(request)
        session = self._sessions.open(_validated(AskedSession, await body_of(request)))
        name = session.head.session
        front = request.path.removesuffix("/sessions")
        return {
            **_facts(session),
            "base_url": f"{request.scheme}://{request.host}/sessions/{name}/v1",
            "api_key": self.key_of(name),
            "model": self._model,
            "url": f"{front}/sessions/{name}/v1",
        }

    async def _list(self, request: web.Request) -> Any:
        self._need_token(request)
        found = [_facts(session) for session in self._sessions.all()]
        return _cut(found, "created_at", request)

    async def _look(self, request: web.Request) -> Any:
        return _facts(self._session(request))

    async def _traces(self, request: web.Request) -> Any:
        return _cut(traces_of(self._session(request), self._model), "timestamp", request)

    async def _trace(self, request: web.Request) -> Any:
        self._need_token(request)
        wanted = request.match_info["trace"]
        for session in self._sessions.all():
            if wanted.startswith(session.head.episode_id):
                for trace in traces_of(session, self._model):
                    if trace["trace_id"] == wanted:
                        return trace
        raise ApiError(404, f"no open session has a call {wanted!r}", code="not_found")

    async def _end(self, request: web.Request) -> Any:
        session = self._session(request)
        asked = _validated(AskedEnd, await body_of(request) if request.can_read_body else {})
        self._sessions.end(session, asked)
        return {**_facts(session), "ended": True}

    async def _delete(self, request: web.Request) -> Any:
        session = self._session(request)
        self._sessions.end(session, AskedEnd())
        return {"deleted": session.n_calls, "session_id": session.head.session}

    async def _commit(self, request: web.Request) -> Any:
        self._need_token(request)
        rollouts, n_episodes = await self._sessions.commit()
        return {"rollouts": rollouts, "episodes": n_episodes, "policy": self._sessions.policy}

    async def _workers(self, request: web.Request) -> Any:
        self._need_token(request)
        return [
            {"worker_id": name, "url": name, "api_path": "/v1", "model_name": self._model, "healthy": is_serving}
            for name, is_serving in self._sessions.workers()
        ]

    async def _no_workers(self, request: web.Request) -> Any:
        self._need_token(request)
        raise ApiError(
            405,
            "the gateway's workers are those with which it was started: each is checked to serve the policy",
            code="unsupported",
        )

    async def _flush(self, request: web.Request) -> Any:
        self._need_token(request)
        return {"status": "flushed"}  # a call is on disk before it is answered

    def _session(self, request: web.Request) -> CapturedSession:
        name, key = request.match_info["session"], key_in(request)
        is_token = same_key(key, self._token)
        if not is_token and not same_key(key, self.key_of(name)):
            raise ApiError(401, "no session of this name is open with this key", code="invalid_api_key")
        session = self._sessions.find(name)
        if session is None:
            raise ApiError(404, f"no session {name!r} is open", code="session_not_found")
        return session

    def _need_token(self, request: web.Request) -> None:
        if not same_key(key_in(request), self._token):
            raise ApiError(401, "this needs the token that the gateway was started with", code="invalid_api_key")


def new_name() -> str:
    """Of a session that was given none."""
    return secrets.token_hex(16)


async def _answered(answer: _Answer, request: web.Request) -> web.Response:
    try:
        return web.json_response(await answer(request))
    except ApiError as error:
        refusal = error
    except RollmillError as error:
        refusal = ApiError(400, str(error), code="refused")
    return web.json_response(ChatApi().refusal(refusal), status=refusal.status)


def _validated(model: Any, values: dict[str, Any]) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise ApiError(400, f"{where}: {first['msg']}", code="invalid_request", param=where) from None


def _facts(session: CapturedSession) -> dict[str, Any]:
    head = session.head
    return {
        "session_id": head.session,
        "episode_id": head.episode_id,
        "trace_count": session.n_calls,
        "created_at": head.created_at.timestamp(),
        "task": head.task,
        "metadata": head.metadata,
    }


def _cut(found: list[dict[str, Any]], time: str, request: web.Request) -> list[dict[str, Any]]:
    """Those since a time, at most so many."""
    try:
        since = float(request.query.get("since", "-inf"))
        limit = int(request.query.get("limit", len(found)))
    except ValueError:
        raise ApiError(400, "since is a time in seconds, limit a whole number", code="invalid_request") from None
    return [one for one in found if one[time] >= since][: max(limit, 0)]
