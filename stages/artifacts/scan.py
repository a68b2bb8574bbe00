"""Lazy frames over stored tables: one artifact's, or a whole run's with ``run`` and ``iteration`` columns."""

from typing import TYPE_CHECKING, Any

from schemas.artifacts import GIVEN_POLICIES, Manifest, Ref
from schemas.config import nearest
from schemas.errors import NotFoundError
from schemas.tables import TABLES
from stages.artifacts.cache import missing
from stages.artifacts.checksums import each
from stages.artifacts.frames import check_readable, scan_files
from stages.artifacts.layout import artifact_folder, corrupt
from stages.artifacts.store import Store, open_store

if TYPE_CHECKING:
    import polars as pl


def scan(ref_or_run: str | Ref | Manifest, table: str, *, store: Store | str | None = None) -> "pl.LazyFrame":
    """The rows of a table, read when they are needed.

    Args:
        ref_or_run: an artifact (``rollouts/3f2a``, ``RUN:rollouts``, ``RUN@3:rollouts``, a ``Ref`` or a
            ``Manifest``), or the name of a run: all its iterations, with columns ``run`` and ``iteration`` in front.
        table: ``steps``, ``episodes``, ``rewards``, …
        store: an open store or its URL; None: ``ROLLMILL_STORE``, else ``./store``.
    Raises:
        NotFoundError: there is no such run, artifact or table; the message names the nearest.
    """
    if table not in TABLES:
        raise NotFoundError(f"there is no table {table!r}", hint=nearest(table, list(TABLES)))
    opened = _opened(store)
    if isinstance(ref_or_run, str) and not any(mark in ref_or_run for mark in ":/"):
        return _scan_run(opened, ref_or_run, table)
    return _scan_artifact(opened, opened.manifest(ref_or_run), table)


def _opened(store: Store | str | None) -> Store:
    if isinstance(store, Store):
        return store
    return open_store(store, writable=False)


def _scan_artifact(store: Store, manifest: Manifest, table: str) -> "pl.LazyFrame":
    check_readable(manifest, table)
    folder, storage = artifact_folder(manifest.kind, manifest.key), store.storage
    sources: list[Any] = []
    options: dict[str, Any] = {}
    for entry in manifest.table_files(table):
        local = storage.local_path(f"{folder}/{entry.path}")
        if local is not None:
            if not local.exists():
                raise missing(storage, manifest, entry)
            if (size := local.stat().st_size) != entry.bytes:
                problem = f"it has {size} bytes, its manifest says {entry.bytes}"
                raise corrupt(storage, f"{folder}/{entry.path}", problem)
        source, options = storage.polars_source(f"{folder}/{entry.path}")
        sources.append(source)
    return scan_files(sources, table, options)


def _scan_run(store: Store, run: str, table: str) -> "pl.LazyFrame":
    import polars as pl

    made: list[tuple[int | None, Ref]] = [
        (record.iteration, ref)
        for record in store.iterations(run)
        for name, ref in record.artifacts.items()
        if name not in GIVEN_POLICIES
    ]
    end = store.run_end(run)
    if end is not None and end.report is not None:
        made.append((None, end.report))
    refs = list({ref.key: ref for _, ref in made}.values())
    manifests = {manifest.key: manifest for manifest in each(store.storage, store.manifest, refs)}
    frames = [
        _labelled(_scan_artifact(store, manifests[ref.key], table), run, iteration)
        for iteration, ref in made
        if table in manifests[ref.key].schema_versions
    ]
    if not frames:
        raise NotFoundError(f"the run {run!r} has no table {table!r}", hint="see what it made: rollmill runs")
    return pl.concat(frames)


def _labelled(frame: "pl.LazyFrame", run: str, iteration: int | None) -> "pl.LazyFrame":
    import polars as pl

    labels = [pl.lit(run).alias("run"), pl.lit(iteration, dtype=pl.Int32).alias("iteration")]
    return frame.select(*labels, pl.exclude("run", "iteration"))
