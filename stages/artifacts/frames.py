"""Lazy frames over exact files: no listing, no partition columns guessed from paths."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schemas.artifacts import Manifest
from schemas.config import nearest
from schemas.errors import NotFoundError, StoreError
from schemas.tables import TABLES
from stages.artifacts.parquet import empty_table

if TYPE_CHECKING:
    import polars as pl


def check_readable(manifest: Manifest, table: str) -> None:
    """Refuses a table that the artifact does not have or that this Rollmill cannot read.

    Raises:
        NotFoundError, StoreError.
    """
    if table not in manifest.schema_versions:
        raise NotFoundError(
            f"{manifest.ref} has no table {table!r}", hint=nearest(table, sorted(manifest.schema_versions))
        )
    written = manifest.schema_versions[table]
    if table not in TABLES or TABLES[table].version != written:
        reads = TABLES[table].version if table in TABLES else "none"
        raise StoreError(
            f"the table {table!r} of {manifest.ref} was written in version {written}, this Rollmill reads {reads}",
            hint="read it with the Rollmill that wrote it, or make the artifact again",
        )


def scan_files(sources: Sequence[Any], table: str, options: Mapping[str, Any] | None = None) -> "pl.LazyFrame":
    """The rows of Parquet files of one table; no files, no rows, the same columns."""
    import polars as pl

    if not sources:
        frame = pl.from_arrow(empty_table(table))
        assert isinstance(frame, pl.DataFrame)
        return frame.lazy()
    return pl.scan_parquet(list(sources), hive_partitioning=False, glob=False, **(options or {}))
