"""Reads the rows of a file, each with its place, and cuts a file into segments that are read alone.

A row is a dict; its place is what a person needs to find it (``line 7``, ``row 7``). Nothing here
knows what a task is. Lines end at ``\\n`` only: U+2028 and U+0085 occur inside JSON strings.
"""

import csv
import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from schemas.config import ConfigModel
from schemas.errors import InputError

Row = tuple[str, dict[str, Any]]
"""Place of a row, and its values by column."""


class Segment(ConfigModel):
    """Consecutive rows of a file."""

    n_rows: int
    offset: int
    """Where to start: a byte of the decompressed text, or a row group of a Parquet file."""
    line: int
    """Number of the line or row that starts there, from 1."""


def segments(path: Path, format_: str, name: str, rows_each: int, limit: int | None) -> list[Segment]:
    """The file's rows in segments of ``rows_each`` (of whole row groups for Parquet), at most ``limit`` rows in all.

    Args:
        name: what the file is called in messages.
    """
    if format_ == "parquet":
        return _parquet_segments(path, name, rows_each, limit)
    found: list[Segment] = []
    for n, (line, offset, _) in enumerate(islice(_records(path, format_, name, None), limit)):
        if n % rows_each == 0:
            found.append(Segment(n_rows=0, offset=offset, line=line))
        found[-1] = found[-1].model_copy(update={"n_rows": found[-1].n_rows + 1})
    return found


def read(path: Path, format_: str, name: str, segment: Segment | None = None) -> Iterator[Row]:
    """The rows of one segment, or of the whole file.

    Raises:
        InputError: with the file and the line of what cannot be read.
    """
    if format_ == "parquet":
        return _read_parquet(path, name, segment)
    rows = _read_jsonl(path, name, segment) if format_ == "jsonl" else _read_csv(path, name, segment)
    return islice(rows, segment.n_rows if segment else None)


def _read_jsonl(path: Path, name: str, segment: Segment | None) -> Iterator[Row]:
    for line, _, text in _records(path, "jsonl", name, segment):
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{name}, line {line}: invalid JSON at column {error.colno}: {error.msg}") from None
        if not isinstance(row, dict):
            raise InputError(f"{name}, line {line}: a JSON {type(row).__name__} where an object is expected")
        yield f"line {line}", row


def _read_csv(path: Path, name: str, segment: Segment | None) -> Iterator[Row]:
    _, _, header = next(_csv_records(path, name, None, with_header=True), (0, 0, []))
    if len(set(header)) != len(header):
        raise InputError(f"{name}, line 1: a column name occurs twice in the header: {', '.join(header)}")
    for line, _, cells in _records(path, "csv", name, segment):
        if len(cells) != len(header):
            raise InputError(f"{name}, line {line}: {len(cells)} columns, where the header names {len(header)}")
        yield f"line {line}", dict(zip(header, cells, strict=True))


def _records(path: Path, format_: str, name: str, segment: Segment | None) -> Iterator[tuple[int, int, Any]]:
    """Line number, byte offset, and the record that starts there; blank lines are skipped."""
    if format_ == "csv":
        yield from _csv_records(path, name, segment)
    else:
        with _opened(path, name) as file:
            for line, offset, text in _lines(file, name, segment):
                if text.strip():
                    yield line, offset, text


def _csv_records(
    path: Path, name: str, segment: Segment | None, *, with_header: bool = False
) -> Iterator[tuple[int, int, list[str]]]:
    csv.field_size_limit(2**31 - 1)
    with _opened(path, name) as file:
        place = [1, 0]
        first_of_record: list[int] = []

        def lines() -> Iterator[str]:
            for line, offset, text in _lines(file, name, segment):
                place[:] = [line, offset]
                if not first_of_record:
                    first_of_record.extend(place)
                yield text

        skip = 0 if segment is not None or with_header else 1
        try:
            for n, cells in enumerate(csv.reader(lines(), strict=True)):
                line, offset = first_of_record
                first_of_record.clear()
                if cells and n >= skip:
                    yield line, offset, cells
        except csv.Error as error:
            raise InputError(f"{name}, line {place[0]}: invalid CSV: {error}") from None


def _lines(file: IO[bytes], name: str, segment: Segment | None) -> Iterator[tuple[int, int, str]]:
    line, offset = (segment.line, segment.offset) if segment else (1, 0)
    try:
        file.seek(offset)
        for raw in file:
            try:
                text = raw.decode("utf-8-sig" if offset == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{name}, line {line}: not UTF-8 (byte {raw[error.start]:#04x} at place {error.start + 1})"
                ) from None
            yield line, offset, text
            line, offset = line + 1, offset + len(raw)
    except (gzip.BadGzipFile, EOFError) as error:
        raise InputError(f"{name}, line {line}: not a complete gzip file: {error}") from None


def _opened(path: Path, name: str) -> IO[bytes]:
    try:
        with open(path, "rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        return gzip.open(path, "rb") if compressed else open(path, "rb")  # type: ignore[return-value]
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from None


def _parquet_segments(path: Path, name: str, rows_each: int, limit: int | None) -> list[Segment]:
    metadata = _parquet_file(path, name).metadata
    left = metadata.num_rows if limit is None else min(limit, metadata.num_rows)
    found: list[Segment] = []
    line = 1
    for group in range(metadata.num_row_groups):
        n_rows = min(metadata.row_group(group).num_rows, left)
        if n_rows and found and found[-1].n_rows + n_rows <= rows_each:
            found[-1] = found[-1].model_copy(update={"n_rows": found[-1].n_rows + n_rows})
        elif n_rows:
            found.append(Segment(n_rows=n_rows, offset=group, line=line))
        line, left = line + n_rows, left - n_rows
    return found


def _read_parquet(path: Path, name: str, segment: Segment | None) -> Iterator[Row]:
    file = _parquet_file(path, name)
    line = segment.line if segment else 1
    left = segment.n_rows if segment else file.metadata.num_rows
    groups = range(segment.offset if segment else 0, file.metadata.num_row_groups)
    try:
        for batch in file.iter_batches(batch_size=1024, row_groups=list(groups)):
            for row in batch.slice(0, left).to_pylist():
                yield f"row {line}", row
                line, left = line + 1, left - 1
            if left == 0:
                return
    except (OSError, ValueError) as error:
        raise InputError(f"{name}, row {line}: the Parquet file cannot be read: {error}") from None


def _parquet_file(path: Path, name: str) -> Any:
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be read as Parquet: {error}") from None
