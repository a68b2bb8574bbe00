"""Agents in processes of their own: started, given attempts, answered, and ended with all that they have started."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from schemas.errors import RollmillError
from schemas.records import Episode, Task, Trajectory
from stages.rollouts.sdk import AgentConfig, ModelCalls
from stages.rollouts.workers.process import end_guarded, guarded, how_ended

_MOST_BYTES = 64 << 20
"""Of one message."""


class ProcessDied(RollmillError):
    """An agent's process has ended, and not because its attempt was over."""


class AgentRaised(Exception):
    """What an agent raised in its process; ``kind`` is the name of its class there."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class AgentProcesses:
    """The processes of one event loop. One that its agent has left clean is used again."""

    def __init__(self) -> None:
        self._idle: list[_Process] = []

    async def run(self, agent: str, task: Task, config: AgentConfig) -> Any:
        """Runs the agent called ``agent`` once, and returns what it returned.

        Raises:
            AgentRaised: it raised.
            ProcessDied: its process has ended before.
        """
        process = self._idle.pop() if self._idle else await _Process.started()
        is_clean = False
        try:
            told = await process.attempt(agent, task, config)
            is_clean = told["clean"]
        finally:
            if is_clean:
                self._idle.append(process)
            else:
                process.end()
        if "error" in told["done"]:
            raise AgentRaised(told["done"]["kind"], told["done"]["error"])
        return _result(told["done"]["returned"])

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()


class _Process:
    def __init__(self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def started(cls) -> "_Process":
        here, there = socket.socketpair()
        with there:
            # What agents print is shown to nobody: it may hold the keys that they were given.
            process = subprocess.Popen(
                guarded([sys.executable, "-m", "stages.rollouts.child", str(there.fileno())], 0.0, has_pipe=False),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        return cls(process, *await asyncio.open_connection(sock=here, limit=_MOST_BYTES))

    async def attempt(self, agent: str, task: Task, config: AgentConfig) -> dict[str, Any]:
        names = ("model", "session_uid", "sampling_params", "is_validation", "metadata", "seed", "role")
        told = {name: getattr(config, name) for name in names}
        self._send({"agent": agent, "task": asdict(task), "config": told})
        answering: set[asyncio.Task[None]] = set()
        try:
            while line := await self._reader.readline():
                message: dict[str, Any] = json.loads(line)
                if "done" in message:
                    return message
                answer = asyncio.create_task(self._answer(message, config.calls))
                answering.add(answer)
                answer.add_done_callback(answering.discard)
        except (ConnectionError, ValueError) as error:
            raise ProcessDied(f"the agent's process cannot be understood: {error}") from error
        finally:
            for answer in list(answering):
                answer.cancel()
        self.end()
        raise ProcessDied(f"the agent's process {how_ended(self._process.returncode)}")

    async def _answer(self, message: dict[str, Any], calls: ModelCalls) -> None:
        answer: dict[str, Any] = {"number": message["number"]}
        try:
            if message["ask"] == "chat":
                reply = await calls.chat(message["role"], message["messages"])
                answer["answer"] = {"text": reply.text, "finish_reason": reply.finish_reason}
            elif message["ask"] == "base_url":
                answer["answer"] = calls.base_url(message["role"])
            else:
                answer["answer"] = calls.api_key
        except Exception as error:
            answer |= {"kind": type(error).__name__, "error": str(error)}
        with contextlib.suppress(ConnectionError):
            self._send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def end(self) -> None:
        """Kills it and all that it has started."""
        end_guarded(self._process)
        self._process.wait()
        self._writer.close()


def _result(told: dict[str, Any]) -> Any:
    if "episode" not in told:
        return told["value"]
    trajectories = [Trajectory(**item) for item in told["episode"].pop("trajectories")]
    return Episode(trajectories=trajectories, **told["episode"])
