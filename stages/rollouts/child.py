"""The inside of an agent's process: runs one attempt after another, and asks the pipeline's process for the policy.

    python -m stages.rollouts.child FD          FD: a socket, over which both sides send JSON, an object a line

When the pipeline's process is gone, this one ends with everything that it has started.
"""

import asyncio
import json
import os
import queue
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from schemas.canonical import canonical_json
from schemas.errors import RollmillError
from schemas.records import Episode, Task
from stages.rollouts.returned import as_episode, returned
from stages.rollouts.sdk import AgentConfig, EpisodeClosed, MaxTurnsReached, Messages, ModelCalls, Reply

_RAISED = {error.__name__: error for error in (MaxTurnsReached, EpisodeClosed)}


def main() -> None:
    link = _Link(socket.socket(fileno=int(sys.argv[1])))
    while True:
        job = link.jobs.get()
        told = _attempt(job, link)
        link.send({"done": told, "clean": _is_clean()})


class _Link(ModelCalls):
    """The other end is in the pipeline's process."""

    def __init__(self, end: socket.socket):
        end.set_inheritable(False)
        self.jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._end = end
        self._sending = threading.Lock()
        self._numbers = count()
        self._asked: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, args=(end.makefile("rb"),), daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._end.sendall(line)

    async def chat(self, trajectory: str, messages: Messages) -> Reply:
        return Reply(**await asyncio.wrap_future(self._ask("chat", trajectory, messages)))

    def chat_sync(self, trajectory: str, messages: Messages) -> Reply:
        return Reply(**self._ask("chat", trajectory, messages).result())

    def base_url(self, trajectory: str) -> str:
        return str(self._ask("base_url", trajectory).result())

    @property
    def api_key(self) -> str:
        return str(self._ask("api_key", "").result())

    def _ask(self, what: str, role: str, messages: Messages | None = None) -> "Future[Any]":
        number, future = next(self._numbers), Future[Any]()
        canonical_json(messages)  # what has no JSON form is refused here as it is without a process between
        self._asked[number] = future
        self.send({"ask": what, "number": number, "role": role, "messages": messages})
        return future

    def _read(self, lines: BinaryIO) -> None:
        for line in lines:
            message = json.loads(line)
            if "number" not in message:
                self.jobs.put(message)
                continue
            future = self._asked.pop(message["number"])
            if not future.set_running_or_notify_cancel():
                continue
            if "error" in message:
                future.set_exception(_RAISED.get(message["kind"], RollmillError)(message["error"]))
            else:
                future.set_result(message["answer"])
        os.killpg(0, signal.SIGKILL)


def _attempt(job: dict[str, Any], link: _Link) -> dict[str, Any]:
    """What the agent returned or raised, in plain JSON."""
    try:
        from stages.rollouts.agents import agent_named

        agent = agent_named(job["agent"])
        task, config = Task(**job["task"]), AgentConfig(**job["config"], calls=link)
        result = asyncio.run(agent(task, config)) if agent.is_async else agent(task, config)
        return {"returned": _plain(result)}
    except (SystemExit, KeyboardInterrupt) as exit_:
        return {"kind": "AgentExit", "error": f"the agent raised {type(exit_).__name__}({exit_})"}
    except asyncio.CancelledError:
        return {"kind": "AgentExit", "error": "the agent cancelled itself"}
    except BaseException as error:
        return {"kind": type(error).__name__, "error": str(error)}


def _plain(result: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    result = as_episode(result)
    if isinstance(result, Episode):
        kept = ("name", "reward", "signals", "output")
        trajectories = [{name: getattr(item, name) for name in kept} for item in result.trajectories]
        notes = {name: getattr(result, name) for name in ("artifacts", "metrics", "metadata", "is_correct")}
        found = {"episode": {**notes, "trajectories": trajectories}}
    elif result is None or isinstance(result, str | dict):
        found = {"value": result}
    else:
        returned(result, "", ())  # says what is wrong with it
    plain: dict[str, Any] = json.loads(canonical_json(found))
    return plain


def _is_clean() -> bool:
    """Whether the agent has left neither threads nor processes, so that the next one may run here."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return threading.active_count() == 2 and children.exists() and not children.read_text()


if __name__ == "__main__":
    main()
