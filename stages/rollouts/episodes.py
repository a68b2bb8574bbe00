"""Runs an agent on attempts, many at once, and records each as an episode whatever happens to it.

An agent's fault is the episode's status; an engine's fault ends the stage, because it says nothing
about the agent.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from schemas.loading import is_user_code
from schemas.records import Task
from stages.rollouts.calls import ModelAnswer, ModelCall
from stages.rollouts.engines.base import EngineFault
from stages.rollouts.engines.progress import Partial, Progress
from stages.rollouts.gateway.server import Endpoint, Gateway
from stages.rollouts.masking import MASK
from stages.rollouts.processes import AgentProcesses, AgentRaised
from stages.rollouts.returned import Returned, returned
from stages.rollouts.sdk import Agent, AgentConfig, EpisodeClosed, MaxTurnsReached, Messages, ModelCalls, Reply
from stages.rollouts.sources import AnyStep, Source, TrajectorySession
from stages.rollouts.telling import Teller

_MESSAGE_LIMIT = 2000
"""Characters of a fault's message that are kept."""
_ABANDONED = "its caller, or the episode, ended before the answer"
_STRAGGLERS_S = 1.0
"""How long agents that ran past their limit may take to notice, before the shard goes on without them."""


class AgentExit(Exception):
    """An agent tried to end the process, or itself."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a task, yet to be made."""

    episode_id: str
    task: Task
    rollout_index: int
    seed: int
    agent_name: str
    agent: Agent


@dataclass(frozen=True)
class CallError:
    """A model call that was not answered, or not at once; it is no step."""

    trajectory: str
    started_at: datetime
    status: str
    """``refused``; ``abandoned``: its caller, or the episode, ended before the answer; or ``retried``: a worker failed
    at it, and it was made again."""
    kind: str
    message: str
    partial: Partial | None = None
    """What had been asked and sampled; None: nothing was asked, or that is not known."""


@dataclass(frozen=True)
class EpisodeRecord:
    """A finished attempt."""

    attempt: Attempt
    status: str
    error_kind: str | None
    error: str | None
    artifacts: str | None
    """Canonical JSON of what the agent returned."""
    started_at: datetime
    duration_s: float
    steps: list[AnyStep]
    """Sorted by trajectory and step."""
    call_errors: list[CallError]
    """Sorted by trajectory and time."""

    @property
    def agent(self) -> str:
        return self.attempt.agent_name


@dataclass(frozen=True)
class Setting:
    """What all attempts share."""

    source: Source
    """What answers."""
    sampling: dict[str, Any]
    """Told to agents."""
    agent_config: dict[str, Any]
    time_limit_s: float | None
    is_validation: bool
    in_processes: bool = False
    """Whether users' functions run in processes of their own."""


def run_attempts(
    attempts: Iterable[Attempt],
    setting: Setting,
    max_concurrency: int,
    finished: Callable[[EpisodeRecord], None],
    is_enough: Callable[[], bool] = lambda: False,
) -> None:
    """Makes all attempts, and gives each record to ``finished`` as its episode ends.

    Args:
        is_enough: asked after each; once it is true, the attempts that are not finished are given up.

    Raises:
        EngineFault: the engine is broken.
    """
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_run(iter(attempts), setting, max_concurrency, finished, is_enough))
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            if not task.cancelling():  # else it is at work on its end
                task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_STRAGGLERS_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _run(
    attempts: Iterable[Attempt],
    setting: Setting,
    max_concurrency: int,
    finished: Callable[[EpisodeRecord], None],
    is_enough: Callable[[], bool],
) -> None:
    source = setting.source
    async with source.at_home(), Gateway(source.model, source.token_text) as gateway:
        await _run_all(attempts, setting, gateway, max_concurrency, finished, is_enough)


async def _run_all(
    attempts: Iterable[Attempt],
    setting: Setting,
    gateway: Gateway,
    max_concurrency: int,
    finished: Callable[[EpisodeRecord], None],
    is_enough: Callable[[], bool],
) -> None:
    enough = asyncio.Event()
    processes = AgentProcesses() if setting.in_processes else None

    async def work() -> None:
        for attempt in attempts:
            finished(await _run_one(attempt, setting, gateway, processes))
            if is_enough():
                enough.set()

    workers = [asyncio.create_task(work()) for _ in range(max_concurrency)]
    all_done, cut_short = asyncio.gather(*workers), asyncio.ensure_future(enough.wait())
    ends: set[asyncio.Future[Any]] = {all_done, cut_short}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if all_done.done():
            all_done.result()
    finally:
        cut_short.cancel()
        for worker in workers:
            worker.cancel()
        if processes is not None:
            await asyncio.wait(workers, timeout=_STRAGGLERS_S)  # those cut short end their processes
            processes.close()


async def _run_one(
    attempt: Attempt, setting: Setting, gateway: Gateway, processes: AgentProcesses | None
) -> EpisodeRecord:
    calls = _EpisodeCalls(attempt, setting, gateway, asyncio.get_running_loop())
    config = AgentConfig(
        model=setting.source.model,
        session_uid=attempt.episode_id,
        sampling_params=dict(setting.sampling),
        is_validation=setting.is_validation,
        metadata=setting.agent_config,
        seed=attempt.seed,
        role=attempt.agent.name,
        calls=calls,
    )
    started_at, began = datetime.now(UTC), time.perf_counter()
    running = asyncio.ensure_future(_started(attempt, config, processes))
    try:
        done, _ = await asyncio.wait({running}, timeout=setting.time_limit_s)
    finally:
        calls.close()
        running.cancel()
    if calls.fault is not None:
        raise calls.fault
    error: BaseException | None = None
    told = Returned()
    if not done:
        error = TimeoutError(f"the episode took longer than its limit of {setting.time_limit_s:g} s")
    elif running.cancelled():
        error = AgentExit("the agent cancelled itself")
    else:
        error = running.exception()
        if error is None:
            try:
                told = returned(running.result(), config.role, calls.roles())
            except (TypeError, ValueError) as unusable:
                error = unusable
    steps = calls.steps(told.names)
    status = _status(bool(done), error, calls, steps)
    fault = error if status in ("error", "timeout") else None
    mask = calls.mask
    return EpisodeRecord(
        attempt=attempt,
        status=status,
        error_kind=None if fault is None else _kind(fault),
        error=None if fault is None else mask(str(fault))[:_MESSAGE_LIMIT],
        artifacts=None if told.artifacts is None else mask(told.artifacts),
        started_at=started_at,
        duration_s=time.perf_counter() - began,
        steps=steps,
        call_errors=calls.errors(told.names, steps),
    )


def _kind(fault: BaseException) -> str:
    return fault.kind if isinstance(fault, AgentRaised) else type(fault).__name__


def _status(in_time: bool, error: BaseException | None, calls: "_EpisodeCalls", steps: list[AnyStep]) -> str:
    if not in_time:
        return "timeout"
    if calls.turns_ran_out and (error is None or _kind(error) == MaxTurnsReached.__name__ or calls.was_told_over_http):
        return "max_turns"
    if error is not None:
        return "error"
    last = max(steps, key=lambda step: step.generation.started_at, default=None)
    return "truncated" if last is not None and last.generation.finish_reason == "length" else "completed"


async def _started(attempt: Attempt, config: AgentConfig, processes: AgentProcesses | None) -> Any:
    agent, task = attempt.agent, attempt.task
    if processes is not None and is_user_code(attempt.agent_name):
        return await processes.run(attempt.agent_name, task, config)
    if agent.is_async:
        try:
            return await agent(task, config)
        except (SystemExit, KeyboardInterrupt) as exit_:
            raise AgentExit(f"the agent raised {type(exit_).__name__}({exit_})") from exit_
    return await _in_thread(lambda: agent(task, config))


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Runs a function in a thread of its own, which ends with the process if it hangs."""
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def target() -> None:
        try:
            result = function()
        except (SystemExit, KeyboardInterrupt) as exit_:
            error: BaseException | None = AgentExit(f"the agent raised {type(exit_).__name__}({exit_})")
        except BaseException as raised:
            error = raised
        else:
            error = None
        if outcome.set_running_or_notify_cancel():
            outcome.set_exception(error) if error is not None else outcome.set_result(result)

    threading.Thread(target=target, daemon=True, name="rollmill-agent").start()
    return await asyncio.wrap_future(outcome)


@dataclass(frozen=True, eq=False)
class _Call:
    """One that is not answered yet."""

    trajectory: str
    started_at: datetime
    progress: Progress


class _EpisodeCalls(ModelCalls):
    """The model calls of one episode, by trajectory."""

    def __init__(self, attempt: Attempt, setting: Setting, gateway: Gateway, loop: asyncio.AbstractEventLoop):
        self.fault: EngineFault | None = None
        self.turns_ran_out = False
        self.was_told_over_http = False
        """That the turns ran out; then the agent's error is one of its client's."""
        self._attempt = attempt
        self._setting = setting
        self._gateway = gateway
        self._endpoint: Endpoint | None = None
        """None: the agent has not asked for one."""
        self._opening = threading.Lock()
        self._loop = loop
        self._sessions: dict[str, TrajectorySession] = {}
        self._closed = False
        self._errors: list[CallError] = []
        self._in_flight: dict[_Call, None] = {}
        self._answered: dict[str, None] = {}
        """Roles, in the order in which they were first answered."""
        self._from_threads: set[concurrent.futures.Future[Reply]] = set()

    async def chat(self, trajectory: str, messages: Messages) -> Reply:
        with self._noted(trajectory, Progress()) as progress:
            return await self._session(trajectory).chat(messages, progress)

    async def call(self, trajectory: str, call: ModelCall, teller: Teller | None = None) -> ModelAnswer:
        """Answers a call that came over HTTP."""
        try:
            with self._noted(trajectory, Progress() if teller is None else teller.progress) as progress:
                return await self._session(trajectory).call(call, teller, progress)
        except MaxTurnsReached:
            self.was_told_over_http = True
            raise

    def refused(self, trajectory: str, kind: str, message: str) -> None:
        """Notes a request over HTTP that could not be made a call."""
        told = self.mask(message)[:_MESSAGE_LIMIT]
        self._errors.append(CallError(trajectory, datetime.now(UTC), "refused", kind, told))

    @contextmanager
    def _noted(self, trajectory: str, progress: Progress) -> Iterator[Progress]:
        """What a failed call means for the episode."""
        if self._closed:
            raise EpisodeClosed("the episode has ended, so the policy is not asked any more")
        call = _Call(trajectory, datetime.now(UTC), progress)
        self._in_flight[call] = None
        try:
            yield progress
            self._answered[trajectory] = None
        except EngineFault as fault:
            self.fault = fault
            raise
        except asyncio.CancelledError as error:
            self._failed(call, "abandoned", error, _ABANDONED)
            raise
        except Exception as error:
            self.turns_ran_out |= isinstance(error, MaxTurnsReached)
            self._failed(call, "refused", error, str(error))
            raise
        finally:
            self._in_flight.pop(call, None)

    def _failed(self, call: "_Call", status: str, error: BaseException, message: str) -> None:
        if call in self._in_flight:
            told, partial = self.mask(message)[:_MESSAGE_LIMIT], call.progress.partial()
            kind = type(error).__name__
            self._errors.append(CallError(call.trajectory, call.started_at, status, kind, told, partial))

    def mask(self, text: str) -> str:
        """``text`` without secrets, the episode's own key among them."""
        if self._endpoint is not None:
            text = text.replace(self._endpoint.api_key, MASK)
        return self._setting.source.mask(text)

    def base_url(self, trajectory: str) -> str:
        return self._opened().base_url(trajectory)

    @property
    def api_key(self) -> str:
        return self._opened().api_key

    def _opened(self) -> Endpoint:
        with self._opening:
            if self._endpoint is None:
                self._endpoint = self._gateway.open(self._attempt.episode_id, self, self._attempt.agent.name)
            return self._endpoint

    def chat_sync(self, trajectory: str, messages: Messages) -> Reply:
        if self._closed or self._loop.is_closed():
            raise EpisodeClosed("the episode has ended, so the policy is not asked any more")
        asked = asyncio.run_coroutine_threadsafe(self.chat(trajectory, messages), self._loop)
        self._from_threads.add(asked)
        try:
            return asked.result()
        except concurrent.futures.CancelledError:
            raise EpisodeClosed("the episode has ended while the policy was asked") from None
        finally:
            self._from_threads.discard(asked)

    def close(self) -> None:
        """No call is answered after this."""
        self._closed = True
        for call in list(self._in_flight):
            self._failed(call, "abandoned", asyncio.CancelledError(), _ABANDONED)
        self._in_flight.clear()
        if self._endpoint is not None:
            self._gateway.close(self._attempt.episode_id)
        for asked in list(self._from_threads):
            asked.cancel()

    def roles(self) -> list[str]:
        """Those under which calls were answered."""
        return list(self._answered)

    def steps(self, names: Mapping[str, str]) -> list[AnyStep]:
        """The answered calls, by trajectory; ``names`` are those of roles that are called otherwise."""
        if not names:
            return [step for name in sorted(self._sessions) for step in self._sessions[name].steps()]
        sessions = sorted((names.get(role, role), session) for role, session in self._sessions.items())
        return [replace(step, trajectory=name) for name, session in sessions for step in session.steps()]

    def errors(self, names: Mapping[str, str], steps: list[AnyStep]) -> list[CallError]:
        """The calls that were not answered, or not at once, by trajectory."""
        found = [replace(error, trajectory=names.get(error.trajectory, error.trajectory)) for error in self._errors]
        found += [
            CallError(step.trajectory, retry.started_at, "retried", retry.kind, f"{retry.worker}: {retry.message}")
            for step in steps
            for retry in step.generation.retries
        ]
        return sorted(found, key=lambda error: (error.trajectory, error.started_at))

    def _session(self, trajectory: str) -> TrajectorySession:
        if trajectory not in self._sessions:
            attempt = self._attempt
            new_session = self._setting.source.new_session
            self._sessions[trajectory] = new_session(trajectory, seed=attempt.seed, uid=attempt.episode_id)
        return self._sessions[trajectory]
