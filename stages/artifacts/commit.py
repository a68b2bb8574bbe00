"""The commit protocol: one piece of work becomes one artifact, whoever else works on it and whenever it is killed.

Manifest there: done. Else the plan is put, then each shard's files and receipt, then the manifest. Each
object is created once; who comes second adopts what the first one put. Bytes are complete before they are put.
"""

import contextlib
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.artifacts import FORMAT_VERSION, FileEntry, Manifest, Plan, Receipt, ShardPlan
from schemas.canonical import canonical_hash
from schemas.config import ConfigModel
from schemas.errors import ConfigError, KindError, NotFoundError, StageFailed, StoreError
from schemas.tables import TABLES
from stages.artifacts.checksums import N_REMOTE_CALLS, each, file_checksum, side_by_side, stored_checksum
from stages.artifacts.code import changes_since, code_version, library_versions
from stages.artifacts.credentials import redacted, refuse_credentials
from stages.artifacts.layout import (
    artifact_folder,
    corrupt,
    manifest_path,
    new_nonce,
    part_file_path,
    plan_path,
    put_record,
    read_record,
    receipt_path,
    table_file_path,
)
from stages.artifacts.parquet import file_pieces, write_parquet
from stages.artifacts.stage import FileOutput, ShardOutput, Stage, Work
from stages.artifacts.storage import TEMPORARY
from stages.artifacts.store import Store, digest_of
from stages.artifacts.temporary import TemporaryFolder

if TYPE_CHECKING:
    import pyarrow as pa

ShardProgress = Callable[[int, int], None]
"""Called with units done and in all."""
Progress = Callable[[str, int, int], None]
"""Called with the shard, units done and in all."""
MapShards = Callable[[Callable[[str], Receipt], Sequence[str]], Any]
"""Calls the function with each shard id, in any order and from any thread, and returns when all are done."""

LEASE_AFTER_S = 3600.0
"""A plan older than this is marked as in work again, so that garbage collection leaves its folder alone."""


@dataclass(frozen=True)
class Request:
    """Work that is asked for: everything that determines an artifact, and how to do it.

    Raises:
        ConfigError, KindError: the inputs, seed or draw do not fit the stage.
    """

    stage: Stage[Any, Any]
    config: ConfigModel
    """As ``stage.resolve`` gave it."""
    execution: ConfigModel
    inputs: dict[str, list[Manifest]] = field(default_factory=dict)
    seed: int | None = None
    """Needed by a stochastic stage; others take no notice of it."""
    draw: int = 0
    """0, 1, …: asks a stochastic stage for another sample."""

    def __post_init__(self) -> None:
        _check_inputs(self.stage, self.inputs)
        if self.draw < 0 or (self.draw and not self.stage.stochastic):
            raise ConfigError(f"the stage {self.stage.name} cannot make draw {self.draw}: it draws nothing at random")
        if self.stage.stochastic and self.seed is None:
            raise ConfigError(f"the stage {self.stage.name} draws at random and needs a seed")
        refuse_credentials(self.config.model_dump(), f"config of the stage {self.stage.name}")

    @cached_property
    def key(self) -> str:
        """64 hexadecimal digits: hash of everything that determines the work, and of nothing else."""
        stage = self.stage
        parts: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "stage": stage.name,
            "stage_version": stage.version,
            "schemas": {table: TABLES[table].version for table in stage.tables},
            "config": self.config,
            "inputs": {name: [given.digest for given in many] for name, many in self.inputs.items() if many},
        }
        if stage.stochastic:
            parts |= {"seed": self.seed, "draw": self.draw}
        try:
            return canonical_hash(parts)
        except TypeError as error:
            raise ConfigError(f"config of the stage {stage.name}: {error}") from None

    @property
    def name(self) -> str:
        """How people name it: kind and the beginning of the key."""
        return f"{self.stage.kind}/{self.key[:12]}"


@dataclass(frozen=True)
class Outcome:
    """What ``materialise`` gave."""

    manifest: Manifest
    cached: bool
    """Whether the artifact was there before, so that no work was done."""
    notes: list[str]
    """What a person should know, e.g. that older code made it."""


def materialise(
    store: Store, request: Request, *, map_shards: MapShards | None = None, progress: Progress | None = None
) -> Outcome:
    """The artifact of this work: the stored one, or made now in this process.

    Args:
        map_shards: how to run the shards; None: one after the other.
    """
    found = lookup(store, request)
    if found is not None:
        return Outcome(found, cached=True, notes=notes_on(found))
    plan = prepare(store, request)

    def one_shard(shard_id: str) -> Receipt:
        def report(done: int, total: int) -> None:
            if progress is not None:
                progress(shard_id, done, total)

        return run_shard(store, request, plan, shard_id, report)

    shard_ids = [shard.id for shard in plan.shards]
    if map_shards is None:
        for shard_id in shard_ids:
            one_shard(shard_id)
    else:
        map_shards(one_shard, shard_ids)
    return Outcome(finish(store, request, plan), cached=False, notes=[])


def lookup(store: Store, request: Request) -> Manifest | None:
    """The finished artifact of this work; None where it is not finished."""
    return store.find(request.stage.kind, request.key)


def notes_on(cached: Manifest) -> list[str]:
    """What differs between the code that made a reused artifact and the code that runs now."""
    changes = changes_since(cached.code, cached.libraries)
    return [f"{cached.ref} is reused; it was made by other code: {'; '.join(changes)}"] if changes else []


def prepare(store: Store, request: Request) -> Plan:
    """Checks the work and fixes its shards; an existing plan is followed.

    Raises:
        RollmillError: the stage refuses the work; then nothing was written.
    """
    store.require_writable()
    stage, inputs = request.stage, store.inputs(request.inputs)
    stage.check(inputs, request.config, request.execution)
    path = plan_path(stage.kind, request.key)
    try:
        return _followed(store, read_record(store.storage, path, Plan))
    except NotFoundError:
        pass
    with _scratch() as scratch:
        specs = stage.plan(inputs, request.config, request.execution, _work(request, scratch))
    plan = Plan(
        kind=stage.kind,
        key=request.key,
        stage=stage.name,
        shards=[ShardPlan(id=f"{index:05d}", spec=spec) for index, spec in enumerate(specs)],
        created_at=datetime.now(UTC),
        nonce=new_nonce(),
    )
    return put_record(store.storage, path, plan)


def run_shard(
    store: Store, request: Request, plan: Plan, shard_id: str, progress: ShardProgress | None = None
) -> Receipt:
    """Does one shard, unless its receipt is there; returns the receipt that counts."""
    (shard,) = [shard for shard in plan.shards if shard.id == shard_id]
    stage, storage = request.stage, store.storage
    path = receipt_path(stage.kind, request.key, shard_id)
    done = _receipt(store, request, shard_id)
    if done is not None:
        return done
    started_at, started = datetime.now(UTC), time.perf_counter()
    with _scratch(storage.scratch_parent()) as scratch:
        work = _work(request, scratch, progress)
        try:
            output = stage.work(shard, store.inputs(request.inputs), request.config, request.execution, work)
        except Exception as error:
            error.add_note(f"in shard {shard_id} of {request.name}")
            raise
        duration_s = time.perf_counter() - started
        files = _put_tables(store, request, shard_id, output, scratch)
        files += _put_files(store, request, shard_id, output.files)
    receipt = Receipt(
        key=request.key,
        shard=shard_id,
        files=files,
        summary=output.summary,
        started_at=started_at,
        duration_s=duration_s,
        host=platform.node(),
        nonce=new_nonce(),
    )
    return put_record(storage, path, receipt)


def finish(store: Store, request: Request, plan: Plan) -> Manifest:
    """Puts the manifest once every shard has its receipt; returns the manifest that counts.

    Raises:
        StageFailed: a shard is not finished.
        CorruptError: a file that a receipt names is gone.
    """
    stage, storage = request.stage, store.storage
    found = each(storage, lambda shard: _receipt(store, request, shard.id), plan.shards)
    receipts = [receipt for receipt in found if receipt is not None]
    if len(receipts) < len(plan.shards):
        raise StageFailed(
            f"{len(plan.shards) - len(receipts)} of {len(plan.shards)} shards of {request.name} are not finished",
            hint="run the same command again: it does what is missing",
        )
    files = [entry for receipt in receipts for entry in receipt.files]
    _check_files(store, request, files)
    now = datetime.now(UTC)
    manifest = Manifest(
        kind=stage.kind,
        key=request.key,
        digest="",
        stage=stage.name,
        stage_version=stage.version,
        schema_versions={table: TABLES[table].version for table in stage.tables},
        files=files,
        inputs={name: [given.ref for given in many] for name, many in request.inputs.items()},
        config=request.config.model_dump(mode="json"),
        execution=redacted(request.execution.model_dump(mode="json")),
        seed=request.seed if stage.stochastic else None,
        draw=request.draw,
        code=code_version(),
        libraries=library_versions(),
        started_at=min((receipt.started_at for receipt in receipts), default=now),
        finished_at=now,
        work_s=sum(receipt.duration_s for receipt in receipts),
        summary=stage.summarise(receipts),
        nonce=new_nonce(),
    )
    manifest = manifest.model_copy(update={"digest": digest_of(manifest)})
    return put_record(storage, manifest_path(stage.kind, request.key), manifest)


def _check_inputs(stage: Stage[Any, Any], inputs: dict[str, list[Manifest]]) -> None:
    unknown = sorted(inputs.keys() - stage.inputs.keys())
    if unknown:
        raise ConfigError(
            f"the stage {stage.name} takes no input {unknown[0]!r}", hint=f"it takes {list(stage.inputs)}"
        )
    for name, spec in stage.inputs.items():
        given = inputs.get(name, [])
        if not given and not spec.optional:
            raise ConfigError(f"the stage {stage.name} needs the input {name!r} (of kind {spec.kind})")
        if len(given) > 1 and not spec.many:
            raise ConfigError(f"the stage {stage.name} takes one {name!r}, got {len(given)}")
        for manifest in given:
            if manifest.kind != spec.kind:
                raise KindError(
                    f"the input {name!r} of the stage {stage.name} must be of kind {spec.kind}, "
                    f"{manifest.ref} is of kind {manifest.kind}"
                )


def _followed(store: Store, plan: Plan) -> Plan:
    """An earlier plan; one that has lain for long is marked as in work again, against garbage collection."""
    if (datetime.now(UTC) - plan.created_at).total_seconds() > LEASE_AFTER_S:
        store.storage.put_if_absent(
            f"{artifact_folder(plan.kind, plan.key)}/{TEMPORARY}lease-{new_nonce()}", b"in work"
        )
    return plan


def _receipt(store: Store, request: Request, shard_id: str) -> Receipt | None:
    try:
        return read_record(store.storage, receipt_path(request.stage.kind, request.key, shard_id), Receipt)
    except NotFoundError:
        return None


@contextlib.contextmanager
def _scratch(parent: Path | None = None) -> Iterator[Path]:
    """A folder for a shard's files; one in a store that its maker has left there is garbage of the store."""
    if parent is None:
        with TemporaryFolder("work") as folder:
            yield folder
    else:
        with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}work-", dir=parent, ignore_cleanup_errors=True) as name:
            yield Path(name)


def _work(request: Request, scratch: Path, progress: ShardProgress | None = None) -> Work:
    seed = request.seed if request.stage.stochastic else None
    if progress is None:
        return Work(request.key, seed, request.draw, scratch)
    return Work(request.key, seed, request.draw, scratch, progress)


def _put_tables(store: Store, request: Request, shard: str, output: ShardOutput, scratch: Path) -> list[FileEntry]:
    undeclared = sorted(output.tables.keys() - set(request.stage.tables))
    if undeclared:
        raise ValueError(f"the stage {request.stage.name} made the table {undeclared[0]!r} and does not declare it")
    pieces = [
        (table, f"{shard}-{index}.parquet", piece)
        for table in request.stage.tables  # in declared order, so that every writer puts the same files
        if table in output.tables
        for index, piece in enumerate(file_pieces(output.tables[table], table))
    ]

    def put(piece: tuple[str, str, "pa.Table"]) -> FileEntry:
        table, name, rows = piece
        file = scratch / f"{TEMPORARY}{table}-{name}"
        try:
            write_parquet(rows, table, file)
        except OSError as error:
            raise StoreError(f"the table {table} of {request.name} cannot be written: {error}") from error
        sha256, size = file_checksum(file), file.stat().st_size
        path = table_file_path(table, shard, sha256)
        _put_data(store, request, path, file, sha256)
        return FileEntry(table=table, name=name, path=path, rows=rows.num_rows, bytes=size, sha256=sha256, shard=shard)

    return side_by_side(put, pieces, os.cpu_count() or 1)


def _put_files(store: Store, request: Request, shard: str, files: Sequence[FileOutput]) -> list[FileEntry]:
    def put(file: FileOutput) -> FileEntry:
        if file.part in TABLES:
            raise ValueError(f"the part {file.part!r} has the name of a table")
        sha256 = file_checksum(file.path)
        path = part_file_path(file.part, shard, sha256, file.name)
        _put_data(store, request, path, file.path, sha256)
        size = file.path.stat().st_size
        return FileEntry(table=file.part, name=file.name, path=path, rows=None, bytes=size, sha256=sha256, shard=shard)

    # Side by side on a local disk too: syncs that wait together share one write of its journal.
    return side_by_side(put, sorted(files, key=lambda file: (file.part, file.name)), N_REMOTE_CALLS)


def _put_data(store: Store, request: Request, path: str, file: Path, sha256: str) -> None:
    """Puts a file named by its content; one that is there already must have that content."""
    stored = f"{artifact_folder(request.stage.kind, request.key)}/{path}"
    if store.storage.put_if_absent(stored, file):
        return
    if stored_checksum(store.storage, stored)[0] != sha256:
        raise corrupt(store.storage, stored, "its content does not fit its name")


def _check_files(store: Store, request: Request, files: Sequence[FileEntry]) -> None:
    folder, storage = artifact_folder(request.stage.kind, request.key), store.storage
    twice = [name for name, n in Counter((entry.table, entry.name) for entry in files).items() if n > 1]
    if twice:
        raise ValueError(f"two shards of {request.name} made the file {'/'.join(twice[0])}")
    listed = {entry.path for entry in storage.entries(f"{folder}/data")}
    for entry in files:
        path = f"{folder}/{entry.path}"
        if path not in listed and not storage.exists(path):
            raise corrupt(storage, path, "it is gone, though a finished shard names it")
