"""Agents that tests name by file: good ones and every kind of bad one."""

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import rollmill
from schemas.records import Episode, Task, Trajectory

FOLLOW_UP = {"role": "user", "content": "sure?"}


def first(task: Task) -> list[dict]:
    return [{"role": "user", "content": task.instruction}]


@rollmill.rollout(name="solver")
async def three_turns(task, config):
    messages = first(task)
    for _ in range(3):
        reply = await config.chat(messages)
        messages = [*messages, reply.message, FOLLOW_UP]
    return {"turns": 3}


@rollmill.rollout
def sync_two_turns(task, config):
    reply = config.chat_sync(first(task))
    config.chat_sync([*first(task), reply.message, FOLLOW_UP])
    return reply.text


async def solver_and_judge(task, config):
    """Not decorated: a plain function is an agent too."""
    solvers = [config.for_role(f"solver-{n}") for n in range(2)]
    found = await asyncio.gather(*(solver.chat(first(task)) for solver in solvers))
    await config.for_role("judge").chat([{"role": "user", "content": "\n".join(reply.text for reply in found)}])
    return Episode(
        trajectories=[Trajectory(name="judge", reward=1.0, signals={"sure": 0.5}), Trajectory(name="solver-0")],
        artifacts={"is_validation": config.is_validation, "metadata": config.metadata, "seed": config.seed},
    )


async def raises_in_second_turn(task, config):
    await config.chat(first(task))
    raise ValueError("no good " + "x" * 5000)


async def hangs(task, config):
    await config.chat(first(task))
    await asyncio.sleep(60)


async def notes_its_end(task, config):
    try:
        await config.chat(first(task))
        await asyncio.sleep(60)
    finally:
        Path(config.metadata["folder"], task.id).touch()


async def hangs_and_ignores_its_end(task, config):
    await config.chat(first(task))
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


def hangs_in_a_thread(task, config):
    config.chat_sync(first(task))
    time.sleep(3)
    config.chat_sync(first(task))


async def asks_for_ever(task, config):
    messages = first(task)
    while True:
        reply = await config.chat(messages)
        messages = [*messages, reply.message, FOLLOW_UP]


async def swallows_the_limit(task, config):
    for _ in range(3):
        try:
            await config.chat(first(task))
        except Exception:
            return "gave up"
    return None


async def returns_nonsense(task, config):
    await config.chat(first(task))
    return 7


async def returns_what_has_no_json(task, config):
    await config.chat(first(task))
    return {"when": object()}


def exits(task, config):
    raise SystemExit(3)


async def exits_async(task, config):
    raise SystemExit(3)


async def cancels_itself(task, config):
    raise asyncio.CancelledError


async def fails_sometimes(task, config):
    await config.chat(first(task))
    if task.id.endswith("1"):
        raise RuntimeError(task.id)


async def too_long(task, config):
    await config.chat([{"role": "user", "content": "0" * 400}])


async def sends_nonsense(task, config):
    await config.chat([{"role": "user", "content": {"a": {1}}}])


async def goes_on_after_a_refusal(task, config):
    for content in ("0" * 400, {"a": {1}}):
        try:
            await config.chat([{"role": "user", "content": content}])
        except Exception:
            continue
    await config.chat(first(task))


async def abandons_a_call(task, config):
    never_answered = asyncio.create_task(config.for_role("slow").chat(first(task)))
    await asyncio.sleep(0)
    never_answered.cancel()
    await config.chat(first(task))


async def tells_a_secret(task, config):
    return {"said": "the key is " + os.environ["SOME_SERVICE_API_KEY"]}


async def raises_a_secret(task, config):
    raise RuntimeError("the key is " + os.environ["SOME_SERVICE_API_KEY"])


async def names_its_trajectory(task, config):
    await config.chat(first(task))
    return Trajectory(name="walker", reward=1.0)


def over_http_in_turns(task, config):
    """As an agent with a client of its own would, with two roles."""
    for role in (config, config.for_role("judge")):
        body = {"model": config.model, "messages": first(task)}
        headers = {"Authorization": f"Bearer {role.api_key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{role.base_url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
    print("my key is", config.api_key)
    return {"last": text, "key": config.api_key, "process": os.getpid()}


def sends_garbage_over_http(task, config):
    headers = {"Authorization": f"Bearer {config.api_key}"}
    bodies = (b"{", json.dumps({"model": "another", "messages": first(task)}).encode())
    for body in bodies:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{config.base_url}/chat/completions", body, headers))
        except urllib.error.HTTPError:
            continue
    config.chat_sync(first(task))


def leaves_things_behind(task, config):
    """A thread that never ends, and a child process that outlives it unless somebody ends it."""
    config.chat_sync(first(task))
    threading.Thread(target=time.sleep, args=(600,)).start()
    child = subprocess.Popen(["sleep", "600"])
    return {"child": child.pid, "process": os.getpid()}


def hangs_with_a_child(task, config):
    config.chat_sync(first(task))
    child = subprocess.Popen(["sleep", "600"])
    Path(config.metadata["folder"], task.id).write_text(f"{child.pid} {os.getpid()}")
    while True:
        pass


def crashes(task, config):
    config.chat_sync(first(task))
    if task.id == "t001":
        os.kill(os.getpid(), signal.SIGSEGV)
    return "fine"


async def takes_one(task):
    return None


NOT_A_FUNCTION = 3


def one_ends_and_others_hang(task, config):
    config.chat_sync([{"role": "user", "content": task.instruction}])
    try:
        open(config.metadata["file"], "x").close()
    except FileExistsError:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(600)
