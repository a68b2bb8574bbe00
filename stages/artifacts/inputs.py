"""The input artifacts of one piece of work: every file is verified by checksum before it is read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.artifacts import Manifest
from stages.artifacts import cache
from stages.artifacts.checksums import each
from stages.artifacts.frames import check_readable, scan_files
from stages.artifacts.stage import Inputs
from stages.artifacts.storage import Storage

if TYPE_CHECKING:
    import polars as pl


class StoredInputs(Inputs):
    """Artifacts of a store, by input name."""

    def __init__(self, storage: Storage, manifests: Mapping[str, Sequence[Manifest]]):
        self._storage = storage
        self._manifests = {name: list(given) for name, given in manifests.items()}

    def manifests(self, name: str) -> list[Manifest]:
        return list(self._manifests.get(name, []))

    def scan(
        self, name: str, table: str, *, artifact: Manifest | None = None, shards: Sequence[str] | None = None
    ) -> "pl.LazyFrame":
        manifests = self.manifests(name) if artifact is None else [artifact]
        for manifest in manifests:
            check_readable(manifest, table)
        chosen = [
            (manifest, entry)
            for manifest in manifests
            for entry in manifest.table_files(table)
            if shards is None or entry.shard in shards
        ]
        files = each(self._storage, lambda pair: cache.verified_file(self._storage, *pair), chosen)
        return scan_files(files, table)

    def folder(self, name: str, part: str, *, artifact: Manifest | None = None) -> Path:
        return cache.part_folder(self._storage, artifact or self.manifest(name), part)
