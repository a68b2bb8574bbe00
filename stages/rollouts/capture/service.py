"""Runs a gateway alone until it is told to stop: sessions open and end, and what was captured is committed."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from schemas.canonical import canonical_hash, seed_from
from schemas.errors import ConfigError
from stages.rollouts.capture.desk import AskedEnd, AskedSession, CaptureDesk, new_name
from stages.rollouts.capture.folders import RunFolder
from stages.rollouts.capture.log import End, Head, cut_to_whole_records, read_session
from stages.rollouts.capture.sessions import CapturedSession, Service
from stages.rollouts.gateway.server import Gateway

Commit = Callable[[Path], tuple[str | None, int]]
"""Puts a batch into the store: the reference of the rollouts (None: nothing was in it), and how many episodes."""
LOG = logging.getLogger("rollmill.gateway")


@dataclass(frozen=True)
class Address:
    """Where a gateway listens, and what opens it."""

    host: str
    port: int
    token: str
    model: str
    """What clients call the policy."""


class CaptureService:
    """The sessions of one gateway. Everything runs in its event loop but commits, which have a thread."""

    def __init__(self, address: Address, service: Service, run: RunFolder, policy: str, commit: Commit):
        self.policy = policy
        self._address = address
        self._service = service
        self._run = run
        self._commit = commit
        self._open: dict[str, CapturedSession] = {}
        self._ended: list[Path] = []
        """Not committed."""
        self._uses: dict[str, int] = {}
        self._tasks: dict[str, str] = {}
        """By id, a hash of what was said of it."""
        self._committing = asyncio.Lock()
        self._desk = CaptureDesk(self, address.token, address.model)
        text = service.template.token_text
        self._gateway = Gateway(address.model, lambda role: text, host=address.host, port=address.port, desk=self._desk)

    async def serve(self, stop: asyncio.Event, left: Sequence[Path], ready: Callable[[str, int], None]) -> None:
        """Serves until ``stop``, then ends all sessions.

        Args:
            left: files of sessions that go on.
            ready: told the address, and how many sessions go on.
        """
        try:
            async with self._service.engine.at_home(), self._gateway:
                for path in left:
                    await self._resume(path)
                ready(self._gateway.url, len(self._open))
                await stop.wait()
            for session in self.all():
                self.end(session, AskedEnd())
        except OSError as error:
            raise ConfigError(
                f"the gateway cannot listen at {self._address.host}, port {self._address.port}: {error.strerror}"
            ) from error

    def open(self, asked: AskedSession) -> CapturedSession:
        name = asked.session_id or new_name()
        task = None if asked.task is None else asked.task.model_dump()
        there = self._open.get(name)
        if there is not None:
            if task is not None and there.head.task != task:
                raise ConfigError(f"the session {name!r} is open already, and for another task")
            return there
        self._note_task(task)
        use = self._uses[name] = self._uses.get(name, 0) + 1
        seed = seed_from(self._run.run.seed, name, use)
        head = Head(name, secrets.token_hex(16), asked.role, seed, datetime.now(UTC), task, asked.metadata)
        session = CapturedSession.begun(head, self._run.session_path(head.episode_id), self._service)
        self._take(session)
        return session

    def find(self, name: str) -> CapturedSession | None:
        return self._open.get(name)

    def all(self) -> list[CapturedSession]:
        return list(self._open.values())

    def end(self, session: CapturedSession, asked: AskedEnd) -> None:
        mask = self._service.mask
        error = None if asked.error is None else mask(asked.error)
        name = session.head.session
        self._gateway.close(name)
        del self._open[name]
        session.end(End(datetime.now(UTC), error, asked.artifacts))
        self._ended.append(session.path)

    async def commit(self) -> tuple[str | None, int]:
        async with self._committing:
            ended, self._ended = self._ended, []
            batch = self._run.new_batch(ended)
            return (None, 0) if batch is None else await asyncio.to_thread(self._commit, batch)

    def workers(self) -> list[tuple[str, bool]]:
        return self._service.engine.workers()

    async def _resume(self, path: Path) -> None:
        cut_to_whole_records(path)
        captured = read_session(path)
        if captured is None:
            path.unlink()
            return
        name = captured.head.session
        self._uses[name] = self._uses.get(name, 0) + 1
        if captured.end is not None or name in self._open:  # two gateways have left one of this name
            self._ended.append(path)
            return
        session, n_different = await CapturedSession.resumed(captured, path, self._service)
        if n_different:
            LOG.warning("%d calls of session %s are not continued from", n_different, name)
        self._note_task(captured.head.task)
        self._take(session)

    def _take(self, session: CapturedSession) -> None:
        head = session.head
        self._open[head.session] = session
        self._gateway.open(head.session, session, head.role, self._desk.key_of(head.session))

    def _note_task(self, task: dict[str, Any] | None) -> None:
        """Refuses a task whose id is another one's."""
        if task is None or task["id"] is None or task["instruction"] is None:
            return
        said = canonical_hash(task)
        if self._tasks.setdefault(task["id"], said) != said:
            raise ConfigError(f"the task {task['id']!r} was described otherwise by another session")
