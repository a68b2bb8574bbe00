"""What is written about artifacts: references, plans, receipts, manifests, and the records of a run.

Every one of them is a JSON object that is created once and never rewritten. ``nonce`` names its
writer, so that a writer whose acknowledgement was lost can recognise its own object.
"""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

FORMAT_VERSION = 1


class Record(BaseModel):
    """A stored object: frozen, and strict about unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Ref(Record):
    """Names one artifact for good: ``key`` is the work, ``digest`` the result."""

    kind: str
    """Stage output: tasks, rollouts, rewards, advantages, policy or report."""
    key: str
    """64 hexadecimal digits: hash of everything that determines the work."""
    digest: str
    """64 hexadecimal digits: hash of the content digests of the artifact's files."""

    def __str__(self) -> str:
        return f"{self.kind}/{self.key[:12]}"


class FileEntry(Record):
    """One file of an artifact."""

    table: str
    """Table name, or for files that are not tables the part (checkpoint, optimizer, page)."""
    name: str
    """Logical file name inside its table or part, e.g. ``model.safetensors``."""
    path: str
    """Path below the artifact's folder; it holds 12 digits of ``sha256``."""
    rows: int | None
    """Rows of a table's file; None: not a table."""
    bytes: int
    sha256: str
    shard: str


class ShardPlan(Record):
    """One unit of work. ``spec`` is the stage's own description of it, plain JSON."""

    id: str
    spec: dict[str, Any]


class Plan(Record):
    """The shards of an artifact, fixed before any work."""

    format_version: int = FORMAT_VERSION
    kind: str
    key: str
    stage: str
    shards: list[ShardPlan]
    created_at: datetime
    nonce: str


class Receipt(Record):
    """One finished shard."""

    format_version: int = FORMAT_VERSION
    key: str
    shard: str
    files: list[FileEntry]
    summary: dict[str, Any]
    started_at: datetime
    duration_s: float
    host: str
    """Name of the machine that did the work."""
    nonce: str


class CodeVersion(Record):
    """Which Rollmill did the work."""

    version: str
    commit: str | None
    """Git commit of the checkout; None: not run from a checkout."""
    dirty: bool | None
    """Whether tracked files differed from the commit; None: not run from a checkout."""


class Manifest(Record):
    """The commit point: it exists if and only if the artifact exists."""

    format_version: int = FORMAT_VERSION
    kind: str
    key: str
    digest: str
    stage: str
    stage_version: int
    schema_versions: dict[str, int]
    """Version of each table's schema."""
    files: list[FileEntry]
    inputs: dict[str, list[Ref]]
    """By the stage's input name, in the order given."""
    config: dict[str, Any]
    execution: dict[str, Any]
    """How the work was done; takes no part in the key."""
    seed: int | None
    """None: the stage is deterministic and takes none."""
    draw: int
    code: CodeVersion
    libraries: dict[str, str]
    started_at: datetime
    finished_at: datetime
    work_s: float
    """Sum over shards of the time spent in the stage's own work, seconds."""
    summary: dict[str, Any]
    nonce: str

    @property
    def ref(self) -> Ref:
        return Ref(kind=self.kind, key=self.key, digest=self.digest)

    def table_files(self, table: str) -> list[FileEntry]:
        """Files of one table or part, in shard order; empty where the artifact has none."""
        return [entry for entry in self.files if entry.table == table]


class RemovedPart(Record):
    """Says that a part of an artifact (``optimizer``) was removed on purpose, to save space."""

    format_version: int = FORMAT_VERSION
    part: str
    removed_at: datetime
    nonce: str


class RunRecord(Record):
    """A run: what was asked for, by whom it can be continued."""

    format_version: int = FORMAT_VERSION
    run: str
    flow: str
    """train or evaluate."""
    config: dict[str, Any]
    """The full config without its execution settings."""
    created_at: datetime
    code: CodeVersion
    nonce: str


GIVEN_POLICIES = ("sampled_by", "policy_in")
"""The artifacts of an iteration's record that it did not make."""


class IterationRecord(Record):
    """What one finished iteration of a run used and made, by stage name."""

    format_version: int = FORMAT_VERSION
    run: str
    iteration: int
    artifacts: dict[str, Ref]
    """``sampled_by`` (the policy that sampled), ``policy_in`` (the one that was updated: the same without overlap),
    tasks, rollouts, rewards, advantages, policy (the new one)."""
    finished_at: datetime
    nonce: str


class RunEnd(Record):
    """A run that has finished: nothing is left to do."""

    format_version: int = FORMAT_VERSION
    run: str
    iterations: int = Field(ge=0)
    report: Ref | None
    """None: the run was asked for none."""
    finished_at: datetime
    nonce: str
