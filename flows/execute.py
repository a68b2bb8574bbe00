"""Executes one stage inside a Prefect flow: one Prefect task a shard, references in, a receipt out.

Our keys decide what is reused; Prefect caches nothing. Any task runner may run the shards: what a
task receives is plain JSON that names the store, the stage, its config and its inputs.
"""

import atexit
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.clusters import Cluster, Threads, start_cluster
from flows.elsewhere import work_in
from flows.progress import Reporter, report
from flows.registry import stage_named
from flows.runner_check import check_runner
from schemas.artifacts import Manifest, Plan, Record, Ref
from schemas.config import ConfigModel, validated
from schemas.runner import RunnerConfig
from stages.artifacts import commit
from stages.artifacts.code import changes_since
from stages.artifacts.layout import plan_path, read_record
from stages.artifacts.store import Store, open_store
from stages.rollouts.config import RolloutsExecution

_WAIT_S = 0.2


class StageCall(Record):
    """Everything that determines a stage's work, as plain JSON."""

    store: str
    single_writer: bool
    stage: str
    config: dict[str, Any]
    execution: dict[str, Any]
    inputs: dict[str, list[Ref]]
    seed: int
    draw: int

    def request(self, store: Store) -> commit.Request:
        """The same as the commit protocol's request."""
        stage = stage_named(self.stage)
        return commit.Request(
            stage=stage,
            config=validated(stage.Config, self.config, self.stage),
            execution=validated(stage.Execution, self.execution, f"execution.{self.stage}"),
            inputs={name: [store.manifest(ref) for ref in refs] for name, refs in self.inputs.items()},
            seed=self.seed,
            draw=self.draw,
        )


class Executor:
    """Runs stages against one store, shows their progress, and remembers what was executed and what reused."""

    def __init__(
        self,
        store: Store,
        reporter: Reporter,
        *,
        seed: int,
        draw: int = 0,
        single_writer: bool = False,
        shards_at_once: int = 4,
    ):
        self.store = store
        self.reporter = reporter
        self.seed = seed
        self.draw = draw
        self.single_writer = single_writer
        self.shards_at_once = shards_at_once
        self.executed: list[Manifest] = []
        self.reused: list[Manifest] = []
        self._command = secrets.token_hex(8)
        """Tells one command from another, to processes of a cluster that outlive both."""
        self._clusters: dict[str, Cluster] = {}
        """Those in other processes, which are kept from stage to stage."""

    def __enter__(self) -> "Executor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._clusters:
            self._clusters.popitem()[1].close()

    def run(
        self,
        name: str,
        config: ConfigModel,
        execution: ConfigModel,
        inputs: Mapping[str, Sequence[Manifest]],
        *,
        title: str | None = None,
        before: Callable[[], None] | None = None,
    ) -> Manifest:
        """The artifact of one stage: from the shelf if it is there, else made, one Prefect task a shard.

        Args:
            title: what a person sees while it works; None: the stage's name.
            before: called before there is work, and not where there is none.
        """
        call = StageCall(
            store=self.store.url,
            single_writer=self.single_writer,
            stage=name,
            config=config.model_dump(mode="json"),
            execution=execution.model_dump(mode="json"),
            inputs={input_name: [manifest.ref for manifest in given] for input_name, given in inputs.items() if given},
            seed=self.seed,
            draw=self.draw if stage_named(name).stochastic else 0,
        )
        request = call.request(self.store)

        def map_shards(_: object, shards: Sequence[str]) -> None:
            if before is not None:
                before()
            self._submit(call, request.key, shards, self._cluster(config, execution))

        with self.reporter.stage(title or name, request.key):
            outcome = commit.materialise(self.store, request, map_shards=map_shards)
        (self.reused if outcome.cached else self.executed).append(outcome.manifest)
        return outcome.manifest

    def say_what_was_reused(self) -> None:
        """One line for each other version of the code whose artifacts were reused."""
        made_by: dict[str, list[str]] = {}
        for manifest in self.reused:
            changes = "; ".join(changes_since(manifest.code, manifest.libraries))
            if changes:
                made_by.setdefault(changes, []).append(str(manifest.ref))
        for changes, refs in made_by.items():
            shown = ", ".join(refs[:3]) + (f" and {len(refs) - 3} more" if len(refs) > 3 else "")
            self.reporter.say(f"[yellow]note:[/] reused what other code made ({changes}): {shown}")

    def _submit(self, call: StageCall, key: str, shards: Sequence[str], cluster: Cluster) -> None:
        """Runs every shard as a task, waits for all so that what can be finished is, then raises the first fault."""
        common = {"call": call.model_dump(mode="json"), "key": key, "n_shards": len(shards)}
        if cluster.is_elsewhere:
            common["caller"] = {"folder": str(Path.cwd()), "command": self._command}
        futures = {shard: cluster.submit(_shard, {**common, "shard": shard}) for shard in shards}
        pending = dict(futures)
        try:
            while pending:  # in short waits: polars' signal handler keeps an interrupt from ending a long one
                for shard in cluster.wait(pending, _WAIT_S):
                    del pending[shard]
                    if cluster.is_elsewhere:
                        report(key, shard, len(shards), 1, 1)
        except BaseException:  # interrupted, or asked to terminate
            cluster.abandon(futures)
            if not cluster.is_elsewhere:
                end_with_main_thread()
            raise
        if not cluster.is_elsewhere:
            cluster.close()
        for future in futures.values():
            cluster.result(future)

    def _cluster(self, config: ConfigModel, execution: ConfigModel) -> Cluster:
        """Where the shards of a stage are worked on."""
        runner = execution.runner if isinstance(execution, RolloutsExecution) else RunnerConfig()
        if runner.type == "threads":
            # Of the stage's own: how many shards work at once is the recipe's to say, not the flow's.
            return Threads(self.shards_at_once)
        key = runner.model_dump_json()
        if key not in self._clusters:
            check_runner(self.store, config, execution)
            self._clusters[key] = start_cluster(runner)
        return self._clusters[key]


def end_with_main_thread() -> None:
    """Ends the process once its main thread has, though shards are at work in threads, which nothing can stop.

    What they have not finished is not in the store, and is done again.
    """

    def end() -> None:
        atexit._run_exitfuncs()  # ends the processes that the stages have started
        sys.stdout.flush()
        os._exit(130)

    threading._register_atexit(end)  # type: ignore[attr-defined]  # before the interpreter waits for every thread


@task(task_run_name="{call[stage]}-{shard}", cache_policy=NO_CACHE, persist_result=False)
def _shard(call: dict[str, Any], key: str, shard: str, n_shards: int, caller: dict[str, str] | None = None) -> None:
    """Does one shard.

    Args:
        caller: which command it is for, and in which ``folder`` that was called; None: this process.
    """
    if caller is not None:
        work_in(**caller)
    document = StageCall.model_validate(call)
    store = open_store(document.store, single_writer=document.single_writer)
    request = document.request(store)
    plan = read_record(store.storage, plan_path(request.stage.kind, key), Plan)
    commit.run_shard(store, request, plan, shard, lambda done, total: report(key, shard, n_shards, done, total))
