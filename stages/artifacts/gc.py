"""Garbage collection: the only part of Rollmill that deletes, and it shows what it would do unless told to do it.

What a manifest names stays for ever. What goes: files that no manifest names, leftovers of killed
writers, work that was begun and left; all only once they have lain untouched for a grace period. On
request also the optimizer state of policies that training has passed.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from schemas.artifacts import Manifest, RemovedPart
from stages.artifacts.layout import artifact_folder, new_nonce, put_record, read_record, removed_path
from stages.artifacts.storage import TEMPORARY, Entry
from stages.artifacts.store import Store

GRACE_S = 7 * 24 * 3600.0
"""How long something must have lain untouched: longer than the longest shard takes."""


@dataclass(frozen=True)
class Garbage:
    """One file that goes."""

    path: str
    bytes: int
    age_s: float
    reason: str


def collect_garbage(
    store: Store, *, grace_s: float = GRACE_S, delete: bool = False, optimizers: bool = False
) -> list[Garbage]:
    """Finds what no manifest names, and deletes it if told to.

    Args:
        grace_s: what was written within this many seconds stays, and so does unfinished work any file of
            which was.
        delete: False only shows what would go.
        optimizers: also the ``optimizer`` part of policies from which another policy was trained, unless it
            is the last policy of a run; a part that was removed says so when it is asked for.
    Raises:
        CorruptError: a manifest is damaged, so that what it names cannot be known; nothing was deleted.
    """
    if delete:
        store.require_writable()
    now = time.time()
    folders, loose = _by_artifact(store)
    manifests = {folder: _manifest(store, folder, entries) for folder, entries in folders.items()}
    garbage = list(_left_over(loose, now, grace_s))
    _delete(store, garbage, delete)
    for folder, entries in folders.items():
        found = list(_garbage_in(folder, entries, manifests[folder], now, grace_s))
        if delete and found and manifests[folder] is None:
            found = list(_garbage_again(store, folder, grace_s))
        _delete(store, found, delete)
        garbage += found
    if optimizers:
        for manifest in _passed_policies(store, [m for m in manifests.values() if m is not None], now, grace_s):
            garbage += _remove_part(store, manifest, "optimizer", folders, now, delete)
    return garbage


def _by_artifact(store: Store) -> tuple[dict[str, list[Entry]], list[Entry]]:
    """Stored files by artifact folder, and those that lie outside of all artifacts."""
    folders: dict[str, list[Entry]] = defaultdict(list)
    loose = []
    for entry in store.storage.entries(""):
        segments = entry.path.split("/")
        if segments[0] == "artifacts" and len(segments) > 3:
            folders["/".join(segments[:3])].append(entry)
        else:
            loose.append(entry)
    return folders, loose


def _manifest(store: Store, folder: str, entries: list[Entry]) -> Manifest | None:
    path = f"{folder}/manifest.json"
    if not any(entry.path == path for entry in entries):
        return None
    return read_record(store.storage, path, Manifest)


def _garbage_in(
    folder: str, entries: list[Entry], manifest: Manifest | None, now: float, grace_s: float
) -> Iterator[Garbage]:
    old = [entry for entry in entries if now - entry.modified >= grace_s]
    if manifest is None:
        if len(old) == len(entries):
            for entry in sorted(old, key=lambda entry: not entry.path.endswith("/plan.json")):
                yield Garbage(entry.path, entry.bytes, now - entry.modified, "begun and never finished")
        return
    named = {f"{folder}/{entry.path}" for entry in manifest.files}
    yield from _left_over(entries, now, grace_s)
    for entry in old:
        is_temporary = entry.path.rsplit("/", 1)[-1].startswith(TEMPORARY)
        if entry.path.startswith(f"{folder}/data/") and entry.path not in named and not is_temporary:
            yield Garbage(entry.path, entry.bytes, now - entry.modified, "no manifest names it")


def _garbage_again(store: Store, folder: str, grace_s: float) -> Iterator[Garbage]:
    """Looks once more just before deleting: somebody may have taken up the unfinished work."""
    entries = list(store.storage.entries(folder))
    return _garbage_in(folder, entries, _manifest(store, folder, entries), time.time(), grace_s)


def _left_over(entries: list[Entry], now: float, grace_s: float) -> Iterator[Garbage]:
    """Temporary files, and scratch folders in which nothing is fresh."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        before, mark, rest = entry.path.partition(TEMPORARY)
        if mark and (not before or before.endswith("/")):
            groups[before + mark + rest.split("/")[0]].append(entry)
    for group in groups.values():
        if all(now - entry.modified >= grace_s for entry in group):
            for entry in group:
                yield Garbage(entry.path, entry.bytes, now - entry.modified, "left by a writer that was killed")


def _delete(store: Store, garbage: list[Garbage], delete: bool) -> None:
    if delete:
        for item in garbage:
            store.storage.delete(item.path)


def _passed_policies(store: Store, manifests: list[Manifest], now: float, grace_s: float) -> Iterator[Manifest]:
    """Policies with an optimizer part from which another policy was made, and which no run may continue from."""
    used = {ref.key for manifest in manifests if manifest.kind == "policy" for ref in manifest.inputs.get("policy", [])}
    last = set()
    for run in store.runs():
        iterations = store.iterations(run)
        if iterations and "policy" in iterations[-1].artifacts:
            last.add(iterations[-1].artifacts["policy"].key)
    for manifest in manifests:
        is_old = now - manifest.finished_at.timestamp() >= grace_s
        if is_old and manifest.key in used - last and manifest.table_files("optimizer"):
            yield manifest


def _remove_part(
    store: Store, manifest: Manifest, part: str, folders: dict[str, list[Entry]], now: float, delete: bool
) -> list[Garbage]:
    folder = artifact_folder(manifest.kind, manifest.key)
    paths = {f"{folder}/{entry.path}" for entry in manifest.table_files(part)}
    kept = {f"{folder}/{entry.path}" for entry in manifest.files if entry.table != part}
    garbage = [
        Garbage(entry.path, entry.bytes, now - entry.modified, f"{part} of a policy that training has passed")
        for entry in folders[folder]
        if entry.path in paths - kept
    ]
    if delete and garbage:
        record = RemovedPart(part=part, removed_at=datetime.now(UTC), nonce=new_nonce())
        put_record(store.storage, removed_path(manifest.kind, manifest.key, part), record)
        _delete(store, garbage, delete)
    return garbage
