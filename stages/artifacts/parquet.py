"""Writes declared tables as Parquet: checked, sorted by id, in row groups of about 512 episodes.

Encodings are the measured ones of the design: zstd 1, byte stream split on lists of floats,
dictionaries on the rest, page checksums. Knows nothing of stores or artifacts.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.tables import TABLES, TableSpec

if TYPE_CHECKING:
    import polars as pl

EPISODES_PER_ROW_GROUP = 512
ROW_GROUP_CELL_BYTES = 64 * 2**20
"""About the most bytes of one heavy column in one row group: readers refuse larger nested columns."""


FILE_CELL_BYTES = 16 * 2**20
"""About the bytes of values in one file; a larger table becomes several files, which are made side by side."""

_BUFFER_BYTES = 4 * 2**20


def file_pieces(table: pa.Table, name: str) -> list[pa.Table]:
    """The rows of the table ``name``, checked and sorted by id, in pieces of one file each.

    Raises:
        ValueError: as ``write_parquet``.
    """
    spec = TABLES[name]
    table = sorted_by_id(checked(table, spec), spec)
    bounds = row_group_bounds(table, spec)
    heavy = [_cell_bytes(table.column(field.name), field.type) for field in spec.schema]
    n_bytes = sum(8 * table.num_rows if sizes is None else int(sizes.sum()) for sizes in heavy)
    groups_per_file = max(1, len(bounds) * FILE_CELL_BYTES // max(n_bytes, 1))
    cuts = [*bounds[:-1:groups_per_file], table.num_rows]
    return [table.slice(start, stop - start) for start, stop in itertools.pairwise(cuts)]


def write_parquet(table: pa.Table, name: str, target: Path) -> None:
    """Writes ``table`` as a Parquet file in the declared form of the table ``name``.

    Raises:
        ValueError: the schema differs from the declared one, a column holds a null that it may not,
            or two rows have the same id.
    """
    import pyarrow.parquet as pq

    spec = TABLES[name]
    table = sorted_by_id(checked(table, spec), spec)
    schema = spec.schema.with_metadata({"rollmill.table": spec.name, "rollmill.schema_version": str(spec.version)})
    bounds = row_group_bounds(table, spec)
    with (
        pa.output_stream(target, buffer_size=_BUFFER_BYTES) as sink,
        pq.ParquetWriter(sink, schema, **_settings(spec)) as writer,
    ):
        for start, stop in itertools.pairwise(bounds):
            writer.write_table(table.slice(start, stop - start), row_group_size=stop - start)


def table_from_rows(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as the table ``name`` in its declared schema.

    Args:
        rows: each with exactly the declared columns; what is not known is given as None.
    Raises:
        ValueError: a row lacks a column or has one that is not declared.
    """
    spec = TABLES[name]
    declared = set(spec.schema.names)
    for index, row in enumerate(rows):
        if row.keys() != declared:
            raise ValueError(
                f"row {index} of {name}: missing {sorted(declared - row.keys())}, "
                f"not declared {sorted(row.keys() - declared)}"
            )
    columns = []
    for field in spec.schema:
        try:
            columns.append(_column([row[field.name] for row in rows], field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"{name}.{field.name} does not fit {field.type}: {error}") from None
    return checked(pa.Table.from_arrays(columns, schema=spec.schema), spec)


def table_from_frame(name: str, frame: "pl.DataFrame") -> pa.Table:
    """A polars frame with the columns of the table ``name`` (in any order) in its declared schema.

    Raises:
        ValueError: a column is missing, not declared, or does not fit its declared type.
    """
    spec = TABLES[name]
    if set(frame.columns) != set(spec.schema.names):
        raise ValueError(
            f"{name}: missing {sorted(set(spec.schema.names) - set(frame.columns))}, "
            f"not declared {sorted(set(frame.columns) - set(spec.schema.names))}"
        )
    arrow = frame.select(spec.schema.names).to_arrow()
    columns = []
    for field in spec.schema:
        try:
            columns.append(arrow.column(field.name).cast(field.type))
        except pa.ArrowInvalid as error:
            raise ValueError(f"{name}.{field.name} does not fit {field.type}: {error}") from None
    return checked(pa.Table.from_arrays(columns, schema=spec.schema), spec)


def empty_table(name: str) -> pa.Table:
    """The table ``name`` without rows."""
    return TABLES[name].schema.empty_table()


def checked(table: pa.Table, spec: TableSpec) -> pa.Table:
    """``table`` itself, if it has the declared columns, types and non-null values."""
    if table.schema.names != spec.schema.names:
        raise ValueError(f"{spec.name}: the columns are {table.schema.names}, declared are {spec.schema.names}")
    for field in spec.schema:
        column = table.column(field.name)
        if column.type != field.type:
            raise ValueError(f"{spec.name}.{field.name} is {column.type}, declared is {field.type}")
        if not field.nullable and column.null_count:
            raise ValueError(f"{spec.name}.{field.name} holds {column.null_count} nulls and may hold none")
        if pa.types.is_large_list(field.type) and pc.list_flatten(column).null_count:
            raise ValueError(f"{spec.name}.{field.name} holds nulls inside its lists and may hold none")
    return pa.Table.from_arrays(table.columns, schema=spec.schema)


def sorted_by_id(table: pa.Table, spec: TableSpec) -> pa.Table:
    """``table`` in the order of its id columns, each row's id unique."""
    if table.num_rows < 2:
        return table
    order = _compared_to_next(table, spec)
    if (order > 0).any():
        table = table.take(pc.sort_indices(table, [(name, "ascending") for name in spec.id_columns]))
        order = _compared_to_next(table, spec)
    twice = np.flatnonzero(order == 0)
    if len(twice):
        row = table.slice(int(twice[0]), 1).select(list(spec.id_columns)).to_pylist()[0]
        raise ValueError(f"{spec.name}: {len(twice) + 1} rows share an id with another, for example {row}")
    return table


def row_group_bounds(table: pa.Table, spec: TableSpec) -> list[int]:
    """Row numbers at which row groups begin, and the number of rows.

    A group holds the rows of up to 512 values of the first id column, or fewer where a heavy column
    would pass its limit.
    """
    n_rows = table.num_rows
    if n_rows == 0:
        return [0]
    first_id = table.column(spec.id_columns[0])
    changes = np.ones(n_rows, dtype=np.int64)
    if n_rows > 1:
        changes[1:] = pc.not_equal(first_id.slice(1), first_id.slice(0, n_rows - 1)).to_numpy()
    group = (np.cumsum(changes) - 1) // EPISODES_PER_ROW_GROUP
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    bounds = {0, n_rows, *starts.tolist()}
    for field in spec.schema:
        sizes = _cell_bytes(table.column(field.name), field.type)
        if sizes is None:
            continue
        before = np.cumsum(sizes) - sizes
        if before[-1] + sizes[-1] <= ROW_GROUP_CELL_BYTES:
            continue
        in_group = before - before[starts][np.searchsorted(starts, np.arange(n_rows), side="right") - 1]
        part = (in_group + sizes - 1).clip(min=0) // ROW_GROUP_CELL_BYTES
        bounds.update(np.flatnonzero(np.diff(part, prepend=0)).tolist())
    return sorted(bounds)


def _column(values: list[Any], type_: pa.DataType) -> pa.Array:
    """Values as a column; ``pa.array`` alone would cut 1.5 down to 1 for an integer type."""
    inner = type_.value_type if pa.types.is_large_list(type_) else type_
    return pa.array(values).cast(type_) if pa.types.is_integer(inner) else pa.array(values, type_)


def _compared_to_next(table: pa.Table, spec: TableSpec) -> np.ndarray:
    """For each row but the last: -1 where its id comes before the next row's, 0 where equal, 1 after."""
    n = table.num_rows - 1
    order = np.zeros(n, dtype=np.int8)
    for name in spec.id_columns:
        column = table.column(name)
        here, after = column.slice(0, n), column.slice(1)
        greater = pc.greater(here, after).to_numpy().astype(np.int8)
        less = pc.less(here, after).to_numpy().astype(np.int8)
        order = np.where(order == 0, greater - less, order)
        if (order != 0).all():
            break
    return order


def _cell_bytes(column: pa.ChunkedArray, type_: pa.DataType) -> np.ndarray | None:
    """Bytes of each cell of a heavy column; None for a light one."""
    if pa.types.is_large_list(type_):
        width = type_.value_type.bit_width // 8
        return pc.fill_null(pc.list_value_length(column), 0).to_numpy() * width
    if pa.types.is_large_string(type_):
        return pc.fill_null(pc.binary_length(column), 0).to_numpy()
    return None


def _is_text(type_: pa.DataType) -> bool:
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def _settings(spec: TableSpec) -> dict[str, Any]:
    """Writer settings; pyarrow wants each leaf's full path and ignores a short name in silence.

    A dictionary pays for token ids and for text that repeats; for numbers, whose values are mostly
    different, and for a table's only id it adds bytes and time. Statistics pay where rows are sorted.
    """
    float_lists, dictionary = {}, []
    for field in spec.schema:
        if pa.types.is_large_list(field.type):
            leaf = f"{field.name}.list.element"
            if pa.types.is_floating(field.type.value_type):
                float_lists[leaf] = "BYTE_STREAM_SPLIT"
            else:
                dictionary.append(leaf)
            continue
        if _is_text(field.type) and spec.id_columns != (field.name,):
            dictionary.append(field.name)
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": dictionary,
        "column_encoding": float_lists or None,
        "write_statistics": list(spec.id_columns),
        "write_page_checksum": True,
        "store_schema": True,
    }
