"""A gateway alone, from the settings of a command to the rollouts that it leaves in the store."""

import asyncio
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.call import stage_request
from flows.policies import policy_inputs
from schemas.artifacts import Manifest
from schemas.errors import RollmillError
from stages.artifacts import commit
from stages.artifacts.store import Store
from stages.rollouts.capture.config import CaptureConfig, CaptureExecution, GatewayConfig
from stages.rollouts.capture.folders import RunFile, RunFolder, begin, left_behind
from stages.rollouts.capture.stage import STAGE, content_of
from stages.rollouts.config import RolloutsExecution


@dataclass(frozen=True)
class Asked:
    """What a gateway is to be."""

    policy: Manifest
    config: GatewayConfig
    execution: RolloutsExecution
    seed: int
    host: str
    port: int
    token: str
    model: str | None
    """What clients call the policy; None: the beginning of its key."""
    captures: Path
    resume: bool
    """Whether sessions that a killed gateway has left go on; else they are committed now."""


def serve(store: Store, asked: Asked, tell: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM, then commits what was captured.

    Args:
        tell: told what a person should know.
    """
    from stages.rollouts.capture.service import Address, CaptureService
    from stages.rollouts.capture.sessions import CapturedEngine, Service
    from stages.rollouts.chat_template import chat_template_in
    from stages.rollouts.engines import engine_for
    from stages.rollouts.masking import Masker
    from stages.rollouts.sources import sampling_params
    from stages.rollouts.stage import policy_files

    files = policy_files(store.inputs(policy_inputs(store, asked.policy)))
    template = chat_template_in(files.folder)
    sampling = sampling_params(template, asked.config.sampling)
    engine = engine_for(asked.config.engine, asked.execution)
    file = RunFile(
        store=store.url,
        policy=asked.policy.ref,
        gateway=asked.config,
        seed=asked.seed,
        logprob_mode=engine.logprob_mode,
    )
    goes_on = _committed_or_left(store, asked, file, tell)
    with engine.serving(files):
        run = begin(asked.captures, file)
        left = [path.rename(run.sessions / path.name) for old in goes_on for path in old.left()]
        for old in goes_on:
            old.release()
        service = Service(CapturedEngine(engine, files), template, sampling, asked.config, Masker([asked.token]))
        address = Address(asked.host, asked.port, asked.token, asked.model or asked.policy.key[:12])
        captures = CaptureService(
            address, service, run, str(asked.policy.ref), lambda batch: _commit(store, file, batch, tell)
        )

        def ready(url: str, n_resumed: int) -> None:
            tell(f"{asked.policy.ref}, called {address.model!r}, is served at {url}")
            if n_resumed:
                tell(f"{n_resumed} sessions of an earlier gateway go on")
            tell(f"token: {asked.token}")
            tell(f"rLLM's client: GatewayClient({f'{url}/rllm/{asked.token}'!r})")
            tell("Ctrl-C ends it, and puts what was captured into the store")

        asyncio.run(_until_a_signal(captures.serve, left, ready))
    _commit_rest(store, run, tell)


async def _until_a_signal(serve_until: Any, left: list[Path], ready: Callable[[str, int], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve_until(stop, left, ready)


def _committed_or_left(store: Store, asked: Asked, file: RunFile, tell: Callable[[str], None]) -> list[RunFolder]:
    """Finishes what killed gateways have left; the folders whose sessions are to go on are kept."""
    kept = []
    for old in left_behind(asked.captures):
        if old.run.store != store.url:
            tell(f"{old.path} has captured sessions for the store {old.run.store}; start with it to commit them")
            old.abandon()
        elif asked.resume and old.run == file:
            for batch in old.batches():
                _commit(store, old.run, batch, tell)
            kept.append(old)
        else:
            _commit_rest(store, old, tell)
    return kept


def _commit_rest(store: Store, run: RunFolder, tell: Callable[[str], None]) -> None:
    """Commits all that a folder holds, and removes it."""
    try:
        run.new_batch(run.left())
        for batch in run.batches():
            _commit(store, run.run, batch, tell)
    except RollmillError:
        tell(f"what was captured is in {run.path}; the next gateway commits it")
        raise
    run.release()


def _commit(store: Store, run: RunFile, batch: Path, tell: Callable[[str], None]) -> tuple[str | None, int]:
    """One batch as tasks and rollouts, whatever of it was done before; its files are removed then."""
    import shutil

    from stages.rollouts.capture.episodes import read_folder, tasks_of

    sessions = read_folder(batch)
    if not sessions:
        shutil.rmtree(batch)
        return None, 0
    rows = [
        {**task.metadata, "_id": task.id, "_instruction": task.instruction, "_answer": task.answer}
        for task in tasks_of(sessions)
    ]
    source = batch / "tasks.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    fields = {"id": "{_id}", "instruction": "{_instruction}", "answer": "{_answer}"}
    of_tasks = stage_request(
        store,
        "tasks",
        inputs={},
        config={"source": {"type": "file"}, "fields": fields},
        execution={"location": str(source)},
    )
    tasks = commit.materialise(store, of_tasks).manifest
    policy = store.manifest(run.policy)
    config = CaptureConfig(gateway=run.gateway, seed=run.seed, logprob_mode=run.logprob_mode, content=content_of(batch))
    request = commit.Request(
        STAGE, config, CaptureExecution(folder=str(batch)), {"tasks": [tasks], **policy_inputs(store, policy)}
    )
    made = commit.materialise(store, request).manifest
    shutil.rmtree(batch)
    tell(f"{len(sessions)} captured episodes are {made.ref}")
    return str(made.ref), len(sessions)
