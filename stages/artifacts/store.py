"""A store: artifacts by reference, runs by name, and local copies of what they hold.

Readers go through manifests; listings only help people to find a name.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from schemas.artifacts import IterationRecord, Manifest, Ref, RunEnd, RunRecord
from schemas.canonical import canonical_hash
from schemas.errors import CorruptError, NotFoundError, StoreError
from stages.artifacts import cache, references, runs
from stages.artifacts.inputs import StoredInputs
from stages.artifacts.layout import corrupt, manifest_path, read_record
from stages.artifacts.lineage import Node, lineage
from stages.artifacts.storage import Storage, check_exclusive, open_storage


def open_store(url: str | Path | None = None, *, writable: bool = True, single_writer: bool = False) -> "Store":
    """Opens a store; one that is to be written is tested first.

    Args:
        url: a folder, ``s3://bucket/prefix``, ``gs://…`` or ``memory://name``; never with a credential in it.
            None: what the environment variable ROLLMILL_STORE says, else ``./store``.
        writable: False opens for reading: nothing is written, not even the test.
        single_writer: accept a storage on which two writers could overwrite each other.
    Raises:
        StoreError: it cannot be reached or written, or does not create exclusively.
        NotFoundError: opened for reading, and nothing is there.
    """
    storage = open_storage(str(url or default_store()), single_writer=single_writer)
    if not writable:
        if not storage.root_exists():
            raise NotFoundError(f"there is no store at {storage.url}", hint="give its folder or URL with --store")
    elif not check_exclusive(storage) and not single_writer:
        raise StoreError(
            f"the store {storage.url} overwrites an object that is to be created once: two writers could "
            "destroy each other's work",
            hint="use another storage, or accept one writer at a time (single_writer)",
        )
    return Store(storage, writable=writable)


def default_store() -> str:
    """URL of the store that is meant where none is named."""
    return os.environ.get("ROLLMILL_STORE") or "./store"


class Store:
    """An open store. Cheap to hold, safe to share between threads, and picklable."""

    def __init__(self, storage: Storage, *, writable: bool):
        self.storage = storage
        self.url = storage.url
        self.writable = writable

    def manifest(self, ref: Ref | Manifest | str) -> Manifest:
        """The manifest of an artifact, checked against its name and its own digest.

        Raises:
            NotFoundError: there is no such artifact.
            CorruptError: the manifest is damaged, or the artifact has another digest than ``ref`` says.
        """
        if isinstance(ref, Manifest):
            return ref
        if isinstance(ref, str):
            return self.resolve(ref)
        found = self.find(ref.kind, ref.key)
        if found is None:
            raise NotFoundError(f"the store {self.url} has no artifact {ref}")
        if found.digest != ref.digest:
            raise CorruptError(
                f"{ref} has the digest {found.digest[:12]}, but {ref.digest[:12]} was used before: "
                "it was deleted and made again with another result",
                hint="what was made from the older result cannot be continued; start a new run",
            )
        return found

    def find(self, kind: str, key: str) -> Manifest | None:
        """The manifest of this work; None where it is not finished."""
        path = manifest_path(kind, key)
        try:
            manifest = read_record(self.storage, path, Manifest)
        except NotFoundError:
            return None
        if (manifest.kind, manifest.key) != (kind, key) or manifest.digest != digest_of(manifest):
            raise corrupt(self.storage, path, "its name or digest does not fit its content")
        return manifest

    def resolve(self, text: str, kind: str | None = None) -> Manifest:
        """The artifact that a person names.

        Args:
            text: ``kind/keyprefix``, ``RUN:kind`` (last iteration), ``RUN@3:kind``, or
                ``<store>/artifacts/<kind>/<key>``.
            kind: the kind that is needed; None: any.
        Raises:
            NotFoundError, KindError, CorruptError.
        """
        return references.resolve(self, text, kind)

    def inputs(self, manifests: Mapping[str, Sequence[Manifest]]) -> StoredInputs:
        """The input artifacts of a piece of work, by the stage's input names."""
        return StoredInputs(self.storage, manifests)

    def folder(self, manifest: Manifest, part: str) -> Path:
        """A local folder with the verified files of a part (``checkpoint``) under their logical names; read only."""
        return cache.part_folder(self.storage, manifest, part)

    def lineage(self, manifest: Manifest | Ref | str) -> Node:
        """The tree of manifests from which this one was made."""
        return lineage(self, self.manifest(manifest))

    def runs(self) -> list[str]:
        """Names of all runs, sorted."""
        return runs.names(self.storage)

    def run(self, name: str) -> RunRecord:
        """What a run was asked for; NotFoundError names the nearest runs."""
        return runs.read(self.storage, name)

    def put_run(self, record: RunRecord) -> RunRecord:
        """Records a run, once; returns what is stored. A run of this name with another config is refused."""
        self.require_writable()
        return runs.put(self.storage, record)

    def iterations(self, name: str) -> list[IterationRecord]:
        """The finished iterations of a run, in order."""
        return runs.iterations(self.storage, name)

    def put_iteration(self, record: IterationRecord) -> IterationRecord:
        """Records a finished iteration, once; returns what is stored."""
        self.require_writable()
        return runs.put_iteration(self.storage, record)

    def run_end(self, name: str) -> RunEnd | None:
        """How a run ended; None while it has not."""
        return runs.read_end(self.storage, name)

    def put_run_end(self, record: RunEnd) -> RunEnd:
        """Records the end of a run, once; returns what is stored."""
        self.require_writable()
        return runs.put_end(self.storage, record)

    def require_writable(self) -> None:
        """Refuses to write through a store that was opened for reading."""
        if not self.writable:
            raise StoreError(f"the store {self.url} was opened for reading only")


def digest_of(manifest: Manifest) -> str:
    """The artifact's digest: over the content of its files, whatever made them and wherever they lie."""
    return canonical_hash(sorted([entry.table, entry.name, entry.sha256] for entry in manifest.files))
