"""Where everything lies in a store, and how its JSON objects are created and read.

Every path is built here from checked names, so that no name can leave the store and none holds an ``=``.
"""

import json
import secrets
from typing import TypeVar

from pydantic import ValidationError

from schemas.artifacts import FORMAT_VERSION, Record
from schemas.canonical import canonical_json
from schemas.errors import CorruptError, NotFoundError, StoreError
from schemas.names import checked_name
from stages.artifacts.storage import Storage

R = TypeVar("R", bound=Record)


def new_nonce() -> str:
    """Names one writing of one object."""
    return secrets.token_hex(16)


def artifact_folder(kind: str, key: str) -> str:
    return f"artifacts/{checked_name(kind, 'artifact kind')}/{checked_name(key, 'artifact key')}"


def manifest_path(kind: str, key: str) -> str:
    return f"{artifact_folder(kind, key)}/manifest.json"


def plan_path(kind: str, key: str) -> str:
    return f"{artifact_folder(kind, key)}/plan.json"


def receipt_path(kind: str, key: str, shard: str) -> str:
    return f"{artifact_folder(kind, key)}/receipts/{checked_name(shard, 'shard')}.json"


def removed_path(kind: str, key: str, part: str) -> str:
    """Says that a part was removed on purpose; it is put before the first of its files is deleted."""
    return f"{artifact_folder(kind, key)}/removed/{checked_name(part, 'part')}.json"


def table_file_path(table: str, shard: str, sha256: str) -> str:
    """Below the artifact's folder; unique by content."""
    return f"data/{checked_name(table, 'table')}/{checked_name(shard, 'shard')}-{sha256[:12]}.parquet"


def part_file_path(part: str, shard: str, sha256: str, name: str) -> str:
    """Below the artifact's folder; ``name`` may have folders of its own, of which the last segment is kept."""
    segments = [checked_name(segment, "file name") for segment in name.split("/")]
    stem = f"{checked_name(shard, 'shard')}-{sha256[:12]}"
    return f"data/{checked_name(part, 'part')}/{stem}-{segments[-1]}"


def run_path(run: str) -> str:
    return f"runs/{checked_name(run, 'run name')}/run.json"


def run_end_path(run: str) -> str:
    return f"runs/{checked_name(run, 'run name')}/end.json"


def iterations_folder(run: str) -> str:
    return f"runs/{checked_name(run, 'run name')}/iterations"


def iteration_path(run: str, iteration: int) -> str:
    return f"{iterations_folder(run)}/{iteration:05d}.json"


def put_record(storage: Storage, path: str, record: R) -> R:
    """Creates a JSON object, once.

    Returns:
        what the store holds now: ``record`` itself where this writer came first (also where the answer
        to its own write was lost: the nonce tells), else the winner's record, to be adopted.
    """
    if storage.put_if_absent(path, canonical_json(record).encode()):
        return record
    return read_record(storage, path, type(record))


def read_record(storage: Storage, path: str, model: type[R]) -> R:
    """The JSON object at ``path``.

    Raises:
        NotFoundError: there is none.
        CorruptError: it is damaged.
    """
    try:
        raw = storage.read(path)
    except FileNotFoundError:
        raise NotFoundError(f"{storage.url} has no {path}") from None
    try:
        values = json.loads(raw)
        if isinstance(values, dict) and (version := values.get("format_version")) != FORMAT_VERSION:
            if isinstance(version, int) and version > FORMAT_VERSION:
                raise StoreError(
                    f"{storage.url}/{path} has format version {version}, this Rollmill reads {FORMAT_VERSION}",
                    hint="read it with a newer Rollmill",
                )
            raise ValueError(f"format version {version!r}")
        return model.model_validate_json(raw)
    except (ValueError, ValidationError) as error:
        reason = f"{error.error_count()} fields are wrong" if isinstance(error, ValidationError) else str(error)
        raise corrupt(
            storage, path, f"it is not a whole {model.__name__.lower()} ({len(raw)} bytes; {reason})"
        ) from None


def corrupt(storage: Storage, path: str, problem: str) -> CorruptError:
    """The error about a damaged object: which file, what is wrong with it, what to do."""
    segments = path.split("/")
    if segments[0] == "artifacts":
        remedy = f"or delete the folder {'/'.join(segments[:3])} and run the command that made it again"
    else:
        remedy = "or delete it and run the same command again"
    return CorruptError(
        f"{storage.url}/{path} is damaged: {problem}", hint=f"restore this file from a copy of the store, {remedy}"
    )
