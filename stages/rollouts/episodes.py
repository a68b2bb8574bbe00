"""Runs an agent on attempts, many at once, and records each as an episode whatever happens to it.

An agent's fault is the episode's status; an engine's fault ends the stage, because it says nothing
about the agent.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from schemas.canonical import canonical_json
from schemas.records import Episode, Task, Trajectory
from stages.rollouts.calls import ModelAnswer, ModelCall
from stages.rollouts.chat_template import ChatTemplate
from stages.rollouts.engines.base import Engine, EngineFault, SamplingParams
from stages.rollouts.gateway.server import Endpoint, Gateway
from stages.rollouts.sdk import Agent, AgentConfig, EpisodeClosed, MaxTurnsReached, Messages, ModelCalls, Reply
from stages.rollouts.session import RecordedStep, Session

_MESSAGE_LIMIT = 2000
"""Characters of a fault's message that are kept."""
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
    steps: list[RecordedStep]
    """Sorted by trajectory and step."""

    @property
    def agent(self) -> str:
        return self.attempt.agent_name


@dataclass(frozen=True)
class Setting:
    """What all attempts share."""

    engine: Engine
    template: ChatTemplate
    policy_id: str
    sampling: SamplingParams
    agent_config: dict[str, Any]
    max_turns: int | None
    time_limit_s: float | None
    is_validation: bool
    agent_samples: bool = False
    """Whether calls over HTTP choose how the policy samples."""

    @property
    def model(self) -> str:
        """What agents call the policy."""
        return self.policy_id[:12]


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
    async with Gateway(setting.model, setting.template.token_text) as gateway:
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

    async def work() -> None:
        for attempt in attempts:
            finished(await _run_one(attempt, setting, gateway))
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


async def _run_one(attempt: Attempt, setting: Setting, gateway: Gateway) -> EpisodeRecord:
    calls = _EpisodeCalls(attempt, setting, gateway, asyncio.get_running_loop())
    config = AgentConfig(
        model=setting.model,
        session_uid=attempt.episode_id,
        sampling_params={
            "temperature": setting.sampling.temperature,
            "top_p": setting.sampling.top_p,
            "top_k": setting.sampling.top_k,
            "max_tokens": setting.sampling.max_tokens,
        },
        is_validation=setting.is_validation,
        metadata=setting.agent_config,
        seed=attempt.seed,
        role=attempt.agent.name,
        calls=calls,
    )
    started_at, began = datetime.now(UTC), time.perf_counter()
    running = asyncio.ensure_future(_started(attempt.agent, attempt.task, config))
    try:
        done, _ = await asyncio.wait({running}, timeout=setting.time_limit_s)
    finally:
        calls.close()
        running.cancel()
    if calls.fault is not None:
        raise calls.fault
    error: BaseException | None = None
    artifacts = None
    if not done:
        error = TimeoutError(f"the episode took longer than its limit of {setting.time_limit_s:g} s")
    elif running.cancelled():
        error = AgentExit("the agent cancelled itself")
    else:
        error = running.exception()
        if error is None:
            try:
                artifacts = _artifacts(running.result())
            except TypeError as unusable:
                error = unusable
    steps = calls.steps()
    status = _status(bool(done), error, calls, steps)
    told = error if status in ("error", "timeout") else None
    return EpisodeRecord(
        attempt=attempt,
        status=status,
        error_kind=None if told is None else type(told).__name__,
        error=None if told is None else str(told)[:_MESSAGE_LIMIT],
        artifacts=artifacts,
        started_at=started_at,
        duration_s=time.perf_counter() - began,
        steps=steps,
    )


def _status(in_time: bool, error: BaseException | None, calls: "_EpisodeCalls", steps: list[RecordedStep]) -> str:
    if not in_time:
        return "timeout"
    if calls.turns_ran_out and (error is None or isinstance(error, MaxTurnsReached) or calls.was_told_over_http):
        return "max_turns"
    if error is not None:
        return "error"
    last = max(steps, key=lambda step: step.generation.started_at, default=None)
    return "truncated" if last is not None and last.generation.finish_reason == "length" else "completed"


def _artifacts(result: Any) -> str | None:
    """Canonical JSON of what the agent returned; the recorded calls are its trajectories.

    Raises:
        TypeError: it is nothing that an agent may return, or has no JSON form.
    """
    if isinstance(result, Trajectory):
        result = [result]
    if isinstance(result, list) and all(isinstance(item, Trajectory) for item in result):
        result = Episode(trajectories=result)
    if isinstance(result, Episode):
        given = [item for item in result.trajectories if item.reward is not None or item.signals]
        named = {item.name: {"reward": item.reward, "signals": item.signals} for item in given}
        result = {**result.artifacts, **({"trajectories": named} if named else {})}
    if result is None or result == {}:
        return None
    if isinstance(result, str):
        result = {"answer": result}
    if not isinstance(result, dict):
        raise TypeError(
            f"the agent returned a {type(result).__name__}, and not an Episode, a Trajectory, a list of them, a dict, "
            "a string or None"
        )
    return canonical_json(result)


async def _started(agent: Agent, task: Task, config: AgentConfig) -> Any:
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
        self._sessions: dict[str, Session] = {}
        self._closed = False
        self._from_threads: set[concurrent.futures.Future[Reply]] = set()

    async def chat(self, trajectory: str, messages: Messages) -> Reply:
        with self._noted():
            return await self._session(trajectory).chat(messages)

    async def call(self, trajectory: str, call: ModelCall) -> ModelAnswer:
        """Answers a call that came over HTTP."""
        try:
            with self._noted():
                return await self._session(trajectory).call(call)
        except MaxTurnsReached:
            self.was_told_over_http = True
            raise

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """What a failed call means for the episode."""
        if self._closed:
            raise EpisodeClosed("the episode has ended, so the policy is not asked any more")
        try:
            yield
        except MaxTurnsReached:
            self.turns_ran_out = True
            raise
        except EngineFault as fault:
            self.fault = fault
            raise

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
        if self._endpoint is not None:
            self._gateway.close(self._attempt.episode_id)
        for asked in list(self._from_threads):
            asked.cancel()

    def steps(self) -> list[RecordedStep]:
        return [step for name in sorted(self._sessions) for step in self._sessions[name].steps()]

    def _session(self, trajectory: str) -> Session:
        if trajectory not in self._sessions:
            setting = self._setting
            self._sessions[trajectory] = Session(
                trajectory,
                template=setting.template,
                engine=setting.engine,
                policy_id=setting.policy_id,
                sampling=setting.sampling,
                max_turns=setting.max_turns,
                seed=self._attempt.seed,
                uid=self._attempt.episode_id,
                agent_samples=setting.agent_samples,
            )
        return self._sessions[trajectory]
