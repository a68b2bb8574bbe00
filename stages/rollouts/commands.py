"""Any program as an agent: it gets its task on standard input or in the environment, asks the policy over HTTP, and
gives its answer on standard output or in a file.
"""

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from schemas.config import ConfigModel
from schemas.records import Task
from stages.artifacts.temporary import TemporaryFolder
from stages.rollouts.sdk import Agent, AgentConfig
from stages.rollouts.workers.process import end_guarded, guarded, how_ended

_MOST_BYTES = 1 << 20
"""Of an answer, or of what a program says on standard error."""
_TOLD = 1000
"""Characters from the end of standard error that a message repeats."""


class CommandAgent(ConfigModel):
    """A program that reads ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, or those of Anthropic."""

    command: list[str] = Field(min_length=1)
    """The program and its arguments, as they are: no shell reads them. It runs in the folder of the pipeline."""
    task: Literal["stdin", "env"] = "stdin"
    """Where it gets the instruction: on standard input, or in the environment variable ``ROLLMILL_TASK``."""
    answer: Literal["stdout", "file"] = "stdout"
    """Where it puts its answer: standard output, or the file that ``ROLLMILL_ANSWER_FILE`` names."""


class CommandFailed(Exception):
    """The program could not be started, or ended with another status than 0."""


def command_agent(setting: CommandAgent) -> Agent:
    """An agent that runs the program once an attempt. Its answer is the artifact ``answer``."""

    async def run(task: Task, config: AgentConfig) -> str:
        with TemporaryFolder("agent") as folder:
            answer_file = folder / "answer"
            said = await _output(setting, task, _environment(setting, task, config, answer_file))
            if setting.answer == "stdout":
                return said
            try:
                with answer_file.open("rb") as file:
                    return file.read(_MOST_BYTES).decode("utf-8", "replace")
            except FileNotFoundError:
                raise CommandFailed("the program has ended without writing the file ROLLMILL_ANSWER_FILE") from None

    return Agent(run)


def _environment(setting: CommandAgent, task: Task, config: AgentConfig, answer_file: Path) -> dict[str, str]:
    url, key = config.base_url, config.api_key
    given = {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": config.model,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": config.model,
        "ROLLMILL_MODEL": config.model,
        "ROLLMILL_SESSION": config.session_uid,
        "ROLLMILL_SEED": str(config.seed),
        "ROLLMILL_TASK_ID": task.id,
        "ROLLMILL_ANSWER_FILE": str(answer_file),
    }
    return {**os.environ, **given, **({"ROLLMILL_TASK": _instruction(task)} if setting.task == "env" else {})}


def _instruction(task: Task) -> str:
    return task.instruction if isinstance(task.instruction, str) else json.dumps(task.instruction, ensure_ascii=False)


async def _output(setting: CommandAgent, task: Task, environment: dict[str, str]) -> str:
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *guarded(setting.command, 0.0, has_pipe=False),
        stdin=pipe if setting.task == "stdin" else nothing,
        stdout=pipe,
        stderr=pipe,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    reading = asyncio.gather(_bounded(process.stdout), _bounded(process.stderr))
    try:
        if process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # it may end without reading its task
                process.stdin.write(_instruction(task).encode())
                await process.stdin.drain()
            process.stdin.close()
        # Whatever it has started ends with it, and lets go of the pipes.
        status = await process.wait()
    except asyncio.CancelledError:
        end_guarded(process)
        await process.wait()
        await reading
        raise
    out, told = await reading
    if status != 0:
        last = told.strip()[-_TOLD:]
        raise CommandFailed(f"{setting.command[0]} {how_ended(status)}{f': {last}' if last else ''}")
    return out.strip()


async def _bounded(stream: asyncio.StreamReader) -> str:
    """What comes, up to a limit; more is read and dropped, so that its writer does not wait."""
    found = bytearray()
    while part := await stream.read(1 << 16):
        found += part[: max(0, _MOST_BYTES - len(found))]
    return found.decode("utf-8", "replace")
