"""What a stage is: inputs, a config, a plan into shards, and the work on one shard.

A stage is a stateless object; it never writes to the store itself. It returns complete tables and
files, and the commit protocol (``stages.artifacts.commit``) puts them on the shelf.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from schemas.artifacts import Manifest, Receipt, ShardPlan
from schemas.config import ConfigModel

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

ConfigT = TypeVar("ConfigT", bound=ConfigModel)
ExecutionT = TypeVar("ExecutionT", bound=ConfigModel)


@dataclass(frozen=True)
class InputSpec:
    """One input of a stage."""

    kind: str
    many: bool = False
    """Whether several artifacts may be given (a report over iterations)."""
    optional: bool = False


class Inputs(ABC):
    """The input artifacts of one piece of work, read through their manifests and verified by checksum."""

    @abstractmethod
    def manifests(self, name: str) -> list[Manifest]:
        """All artifacts given for the input ``name``, in order; empty where an optional one was not given."""

    @abstractmethod
    def scan(
        self, name: str, table: str, *, artifact: Manifest | None = None, shards: Sequence[str] | None = None
    ) -> "pl.LazyFrame":
        """The rows of one table over all artifacts given for ``name``.

        Args:
            artifact: read only this one of the artifacts given; None: all.
            shards: read only the files that these shards made (``FileEntry.shard``), so that a stage can follow
                its input's files with bounded memory; None: all.
        Returns:
            a frame in the table's declared schema, also where there is no file or no row.
        """

    @abstractmethod
    def folder(self, name: str, part: str, *, artifact: Manifest | None = None) -> Path:
        """A local read-only folder with the files of a part (``checkpoint``) under their logical names.

        Args:
            artifact: one of the artifacts given; None: the one.
        """

    def manifest(self, name: str) -> Manifest:
        """The one artifact given for ``name``."""
        (manifest,) = self.manifests(name)
        return manifest


@dataclass(frozen=True)
class FileOutput:
    """A finished local file that becomes part of the artifact."""

    part: str
    name: str
    path: Path


@dataclass
class ShardOutput:
    """What the work on one shard made."""

    tables: Mapping[str, "pa.Table"]
    """By table name, each in its declared schema. A table without rows may be left out."""
    files: Sequence[FileOutput] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    """Plain JSON; the stage's ``summarise`` folds the shards' summaries into the manifest's."""


@dataclass(frozen=True)
class Work:
    """Everything that is known about the work on an artifact beside its config and inputs."""

    key: str
    seed: int | None
    """None for a stage that takes no seed."""
    draw: int
    scratch: Path
    """A folder of this shard's own, deleted afterwards."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Call with units done and in all; the unit is the stage's own (episodes, sequences)."""


class Stage(ABC, Generic[ConfigT, ExecutionT]):
    """One box of the pipeline. Subclasses give the class variables and the three methods."""

    name: ClassVar[str]
    """Unique name, also of its settings in a recipe."""
    kind: ClassVar[str]
    """Kind of the artifact that it makes."""
    version: ClassVar[int]
    """Raised by hand when the same inputs and config would give another result."""
    stochastic: ClassVar[bool]
    """Whether it draws random numbers: only then do seed and draw enter the key."""
    inputs: ClassVar[Mapping[str, InputSpec]]
    tables: ClassVar[tuple[str, ...]]
    Config: ClassVar[type[ConfigModel]]
    """What changes the output; every field enters the key."""
    Execution: ClassVar[type[ConfigModel]]
    """What only changes how the work is done; never in the key."""

    def resolve(self, config: ConfigT, execution: ExecutionT) -> ConfigT:
        """``config`` with what the key must know of the world outside the store (content digests of source files,
        versions of user code) filled in. Called once before the key is made; needs no inputs and writes nothing.

        Raises:
            RollmillError: for a source, grader, agent or engine that does not exist or cannot be used.
        """
        return config

    def check(self, inputs: Inputs, config: ConfigT, execution: ExecutionT) -> None:
        """Refuses what cannot work, before anything is written.

        Raises:
            RollmillError: with what is wrong, where, and what to do.
        """

    @abstractmethod
    def plan(self, inputs: Inputs, config: ConfigT, execution: ExecutionT, work: Work) -> list[dict[str, Any]]:
        """The specs of the shards, plain JSON, in order; the work on each is independent of the others."""

    @abstractmethod
    def work(self, shard: ShardPlan, inputs: Inputs, config: ConfigT, execution: ExecutionT, work: Work) -> ShardOutput:
        """Does one shard."""

    def summarise(self, receipts: Iterable[Receipt]) -> dict[str, Any]:
        """The artifact's summary from those of its shards; the default sums numbers and keeps the rest if equal."""
        total: dict[str, Any] = {}
        for receipt in receipts:
            for name, value in receipt.summary.items():
                if isinstance(value, bool) or not isinstance(value, int | float) or name not in total:
                    total[name] = value if total.get(name, value) == value else None
                else:
                    total[name] += value
        return total
