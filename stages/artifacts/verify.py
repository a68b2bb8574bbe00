"""Computes the checksums of a whole artifact, on demand."""

from schemas.artifacts import FileEntry, Manifest, Ref
from schemas.errors import CorruptError
from stages.artifacts.checksums import each, stored_checksum
from stages.artifacts.layout import artifact_folder, removed_path
from stages.artifacts.store import Store


def verify(store: Store, ref: Manifest | Ref | str) -> int:
    """Reads every file that the artifact's manifest names and compares it.

    Returns:
        bytes read. Parts that were removed on purpose are passed over.
    Raises:
        CorruptError: names every damaged file.
    """
    manifest = store.manifest(ref)
    folder = artifact_folder(manifest.kind, manifest.key)
    parts = sorted({entry.table for entry in manifest.files if entry.rows is None})
    removed = {part for part in parts if store.storage.exists(removed_path(manifest.kind, manifest.key, part))}
    entries = [entry for entry in manifest.files if entry.table not in removed]

    def problem(entry: FileEntry) -> str | None:
        try:
            sha256, size = stored_checksum(store.storage, f"{folder}/{entry.path}")
        except FileNotFoundError:
            return f"{entry.path} is missing"
        if size != entry.bytes:
            return f"{entry.path} has {size} bytes instead of {entry.bytes}"
        return None if sha256 == entry.sha256 else f"{entry.path} has another checksum"

    problems = [found for found in each(store.storage, problem, entries) if found is not None]
    if problems:
        raise CorruptError(
            f"{len(problems)} of {len(entries)} files of {store.url}/{folder} are damaged:\n  " + "\n  ".join(problems),
            hint=f"restore them from a copy of the store, or delete the folder {folder} and run the command that "
            "made it again",
        )
    return sum(entry.bytes for entry in entries)
