"""The records of runs: each created once. A name that is taken by another config is refused."""

import re
from typing import Any

from schemas.artifacts import IterationRecord, RunEnd, RunRecord
from schemas.canonical import canonical_json
from schemas.config import nearest
from schemas.errors import ConfigError, NotFoundError, StoreError
from stages.artifacts.checksums import each
from stages.artifacts.layout import (
    iteration_path,
    iterations_folder,
    put_record,
    read_record,
    run_end_path,
    run_path,
)
from stages.artifacts.storage import Storage

_ITERATION_FILE = re.compile(r"\d{5,}\.json")


def names(storage: Storage) -> list[str]:
    """Names of all runs, sorted."""
    return [name for name in storage.names("runs") if storage.exists(f"runs/{name}/run.json")]


def read(storage: Storage, name: str) -> RunRecord:
    """The run's record.

    Raises:
        NotFoundError: with the nearest names.
    """
    path = run_path(name)
    if not storage.exists(path):
        known = names(storage)
        hint = nearest(name, known) if known else "the store has no runs yet"
        raise NotFoundError(f"the store {storage.url} has no run {name!r}", hint=hint)
    return read_record(storage, path, RunRecord)


def put(storage: Storage, record: RunRecord) -> RunRecord:
    """Creates the run's record, or returns the stored one if it asks for the same.

    Raises:
        ConfigError: a run of this name exists with another flow or config; each difference is listed.
    """
    stored = put_record(storage, run_path(record.run), record)
    asked = {"flow": record.flow, **flattened(record.config)}
    found = {"flow": stored.flow, **flattened(stored.config)}
    changes = [
        f"{name}: {_shown(found, name)} in the store, {_shown(asked, name)} asked for"
        for name in sorted(asked.keys() | found.keys())
        if _shown(asked, name) != _shown(found, name)
    ]
    if changes:
        raise ConfigError(
            f"the run {record.run!r} exists with another config:\n  " + "\n  ".join(changes),
            hint="choose another run name, or give the stored config to continue it",
        )
    return stored


def iterations(storage: Storage, name: str) -> list[IterationRecord]:
    """The finished iterations of a run, in order."""
    read(storage, name)
    found = [file for file in storage.names(iterations_folder(name)) if _ITERATION_FILE.fullmatch(file)]
    paths = [f"{iterations_folder(name)}/{file}" for file in found]
    records = each(storage, lambda path: read_record(storage, path, IterationRecord), paths)
    return sorted(records, key=lambda record: record.iteration)


def put_iteration(storage: Storage, record: IterationRecord) -> IterationRecord:
    """Creates the record of an iteration, or returns the stored one if it names the same artifacts.

    Raises:
        StoreError: another process recorded this iteration with other artifacts.
    """
    stored = put_record(storage, iteration_path(record.run, record.iteration), record)
    if stored.artifacts != record.artifacts:
        names_ = sorted(
            name
            for name in stored.artifacts.keys() | record.artifacts.keys()
            if stored.artifacts.get(name) != record.artifacts.get(name)
        )
        raise StoreError(
            f"iteration {record.iteration} of the run {record.run!r} is recorded with other artifacts: "
            f"{', '.join(names_)} differ",
            hint="two processes continue this run with different work: stop one of them",
        )
    return stored


def read_end(storage: Storage, name: str) -> RunEnd | None:
    """How the run ended; None while it has not."""
    read(storage, name)
    try:
        return read_record(storage, run_end_path(name), RunEnd)
    except NotFoundError:
        return None


def put_end(storage: Storage, record: RunEnd) -> RunEnd:
    """Creates the record of a run's end, or returns the stored one."""
    return put_record(storage, run_end_path(record.run), record)


def flattened(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(flattened(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _shown(flat: dict[str, Any], name: str) -> str:
    return canonical_json(flat[name]) if name in flat else "(absent)"
