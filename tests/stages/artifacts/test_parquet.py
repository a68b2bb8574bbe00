"""Files as the design wants them: encodings, row groups, order, and nothing that breaks the declared schema."""

import io
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from schemas.tables import TABLES
from stages.artifacts import parquet
from stages.artifacts.parquet import file_pieces, row_group_bounds, table_from_frame, table_from_rows, write_parquet
from tests.builders import advantage_rows, episode_rows, metric_rows, step_rows, task_rows


def parquet_bytes(table: pa.Table, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(table, name, Path(folder) / "file")
        return (Path(folder) / "file").read_bytes()


def opened(name: str, rows: list[dict[str, Any]]) -> pq.ParquetFile:
    return pq.ParquetFile(io.BytesIO(parquet_bytes(table_from_rows(name, rows), name)), page_checksum_verification=True)


def columns(file: pq.ParquetFile, group: int = 0) -> dict[str, Any]:
    found = file.metadata.row_group(group)
    return {found.column(i).path_in_schema: found.column(i) for i in range(found.num_columns)}


def test_the_footer_tells_the_encodings_of_the_design() -> None:
    chunks = columns(opened("steps", step_rows([f"e{i}" for i in range(600)])))
    assert {chunk.compression for chunk in chunks.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in chunks["logprobs.list.element"].encodings
    assert not chunks["logprobs.list.element"].has_dictionary_page
    for name in ("prompt_ids.list.element", "response_ids.list.element", "episode_id", "messages", "policy_id"):
        assert chunks[name].has_dictionary_page, name
        assert "BYTE_STREAM_SPLIT" not in chunks[name].encodings


def test_token_advantages_and_probes_are_split_by_byte_too() -> None:
    rows = [row | {"token_advantages": [0.5, 0.25]} for row in advantage_rows(["a-0"], [0.5])]
    assert "BYTE_STREAM_SPLIT" in columns(opened("advantages", rows))["token_advantages.list.element"].encodings
    probe = opened("probe", [{"probe_id": 0, "ids": [1, 2], "logprobs": [-1.0]}])
    assert "BYTE_STREAM_SPLIT" in columns(probe)["logprobs.list.element"].encodings


def test_pages_carry_checksums_that_find_a_flipped_byte() -> None:
    content = bytearray(parquet_bytes(table_from_rows("tasks", task_rows(50)), "tasks"))
    chunk = pq.ParquetFile(io.BytesIO(content)).metadata.row_group(0).column(1)
    content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True).read()


def test_a_file_keeps_the_declared_schema_and_says_what_it_is() -> None:
    file = opened("steps", step_rows(["e1"]))
    declared = TABLES["steps"].schema
    assert file.schema_arrow.remove_metadata().equals(declared.remove_metadata())
    assert (file.schema_arrow.field("latency_s").metadata or {})[b"doc"].startswith(b"from sending")
    assert file.schema_arrow.metadata[b"rollmill.table"] == b"steps"
    assert file.schema_arrow.metadata[b"rollmill.schema_version"] == b"1"


def test_every_declared_table_can_be_written_empty_and_read_back() -> None:
    for name, spec in TABLES.items():
        content = parquet_bytes(parquet.empty_table(name), name)
        assert pl.read_parquet(io.BytesIO(content)).columns == spec.schema.names


def test_rows_are_sorted_by_id_whatever_order_they_came_in() -> None:
    rows = [
        row | {"step_index": index, "trajectory": trajectory}
        for index in (2, 0, 1)
        for trajectory in ("solver", "judge")
        for row in step_rows(["b", "a"])
    ]
    table = opened("steps", rows).read(["episode_id", "trajectory", "step_index"]).to_pylist()
    ids = [tuple(row.values()) for row in table]
    assert ids == sorted(ids)
    assert len(set(ids)) == 12


@for_all(st.permutations(range(12)))
@settings(max_examples=20, deadline=None)
def test_the_bytes_do_not_depend_on_the_order_or_the_chunks_of_the_rows(order: list[int]) -> None:
    rows = step_rows([f"e{i:02d}" for i in range(12)])
    whole = parquet_bytes(table_from_rows("steps", rows), "steps")
    pieces = pa.concat_tables([table_from_rows("steps", [rows[i]]) for i in order])
    assert parquet_bytes(pieces, "steps") == whole


def test_the_bytes_do_not_depend_on_the_chunks_of_rows_that_come_sorted() -> None:
    rows = step_rows([f"e{i:04d}" for i in range(700)])
    pieces = [table_from_rows("steps", rows[start : start + 100]) for start in range(0, 700, 100)]
    whole = parquet_bytes(table_from_rows("steps", rows), "steps")
    assert parquet_bytes(pa.concat_tables(pieces), "steps") == whole


def test_two_rows_with_one_id_are_refused() -> None:
    rows = episode_rows(["t1", "t2"])
    with pytest.raises(ValueError, match=r"episodes: 2 rows share an id.*'t2-1'"):
        parquet_bytes(table_from_rows("episodes", [*rows, rows[-1]]), "episodes")
    steps = step_rows(["e1"]) + [row | {"trajectory": "other"} for row in step_rows(["e1"])]
    assert opened("steps", steps).metadata.num_rows == 2, "the id is all of its columns together"


def test_a_row_group_holds_512_episodes_with_all_their_steps() -> None:
    ids = [f"e{i:05d}" for i in range(1100)]
    rows = [row | {"step_index": index} for index in range(3) for row in step_rows(ids)]
    file = opened("steps", rows)
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert groups == [512 * 3, 512 * 3, 76 * 3]


def test_a_row_group_is_cut_where_a_nested_column_becomes_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_CELL_BYTES", 4000)
    table = table_from_rows("steps", step_rows([f"e{i:03d}" for i in range(600)], response_ids=list(range(100))))
    bounds = row_group_bounds(table, TABLES["steps"])
    assert 512 in bounds
    assert max(np.diff(bounds)) * 100 * 4 <= 4000
    assert len(bounds) < 90
    file = pq.ParquetFile(io.BytesIO(parquet_bytes(table, "steps")))
    assert file.num_row_groups == len(bounds) - 1
    assert file.read().to_pylist() == table.to_pylist()


@for_all(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_row_groups_cover_all_rows_once_and_pass_the_limit_by_less_than_a_row(lengths: list[int], limit: int) -> None:
    rows = [
        row | {"response_ids": [1] * length, "logprobs": [0.0] * length}
        for row, length in zip(step_rows([f"e{i:03d}" for i in range(len(lengths))]), lengths, strict=True)
    ]
    table = table_from_rows("steps", [row | {"messages": "", "response": None, "prompt_ids": None} for row in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "ROW_GROUP_CELL_BYTES", 4 * limit)
        bounds = row_group_bounds(table, TABLES["steps"])
    assert bounds == sorted(set(bounds))
    assert (bounds[0], bounds[-1]) == (0, len(lengths))
    for start, stop in itertools.pairwise(bounds):
        assert sum(lengths[start : stop - 1]) <= limit + max(lengths)


def test_a_large_table_becomes_several_files_that_hold_all_rows_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_from_rows("tasks", [row | {"task_id": f"t{i:05d}"} for i, row in enumerate(task_rows(5000))][::-1])
    assert len(file_pieces(table, "tasks")) == 1
    monkeypatch.setattr(parquet, "FILE_CELL_BYTES", 5000 * 8 * 8 // 3)  # a third of eight light columns
    pieces = file_pieces(table, "tasks")
    assert [piece.num_rows for piece in pieces] == [3 * 512, 3 * 512, 3 * 512, 5000 - 9 * 512]
    ids = pa.concat_tables(pieces)["task_id"].to_pylist()
    assert ids == sorted(str(id_) for id_ in table["task_id"].to_pylist())
    assert file_pieces(table.slice(0, 0), "tasks") == []


def test_only_text_that_may_repeat_has_a_dictionary() -> None:
    chunks = columns(opened("episodes", episode_rows([f"t{i}" for i in range(100)], error="e", error_kind="E")))
    with_dictionary = {name for name, chunk in chunks.items() if chunk.has_dictionary_page}
    assert with_dictionary == {"task_id", "agent", "status", "error_kind", "error", "artifacts"}


def test_ids_have_statistics_and_other_columns_none() -> None:
    chunks = columns(opened("steps", step_rows(["a", "b"])))
    assert chunks["episode_id"].statistics.min == "a"
    with_statistics = {name for name, chunk in chunks.items() if chunk.statistics is not None}
    assert with_statistics == {"episode_id", "trajectory", "step_index"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"duration_s": None}, "episodes.duration_s holds 2 nulls"),
        ({"n_steps": 1.5}, r"episodes\.n_steps does not fit int32.*truncated"),
        ({"n_steps": 2**31}, r"episodes\.n_steps does not fit int32"),
    ],
)
def test_a_value_that_the_schema_does_not_allow_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        table_from_rows("episodes", episode_rows(["t1"], **change))


def test_a_null_inside_a_list_is_refused() -> None:
    with pytest.raises((ValueError, pa.ArrowInvalid), match=r"steps\.logprobs holds nulls inside its lists"):
        table_from_rows("steps", step_rows(["e1"], logprobs=[-0.5, None, -0.5]))


def test_a_missing_or_unknown_column_is_refused_and_never_filled() -> None:
    row = metric_rows("policy", {"loss": 1.0})[0]
    with pytest.raises(ValueError, match=r"missing \['value'\]"):
        table_from_rows("metrics", [{name: value for name, value in row.items() if name != "value"}])
    with pytest.raises(ValueError, match=r"not declared \['extra'\]"):
        table_from_rows("metrics", [row | {"extra": 1}])
    with pytest.raises(ValueError, match="columns are"):
        parquet_bytes(table_from_rows("tasks", task_rows(1)).drop_columns(["answer"]), "tasks")
    table = table_from_rows("metrics", [row])
    narrow = table.set_column(4, "value", table["value"].cast(pa.float32()))
    with pytest.raises(ValueError, match=r"metrics\.value is float, declared is double"):
        parquet_bytes(narrow, "metrics")


def test_a_polars_frame_becomes_the_declared_table() -> None:
    rows = step_rows(["b", "a"], logprobs=None, worker="w1")
    frame = pl.from_arrow(table_from_rows("steps", rows))
    assert isinstance(frame, pl.DataFrame)
    shuffled = frame.select(sorted(frame.columns))
    assert table_from_frame("steps", shuffled).equals(table_from_rows("steps", rows))
    with pytest.raises(ValueError, match=r"missing \['worker'\]"):
        table_from_frame("steps", frame.drop("worker"))
    with pytest.raises(ValueError, match=r"steps\.step_index does not fit int32"):
        table_from_frame("steps", frame.with_columns(step_index=pl.lit(2**40)))


def test_other_readers_see_the_same_rows(tmp_path: Path) -> None:
    import duckdb
    import pandas as pd

    rows = step_rows([f"e{i}" for i in range(5)])
    content = parquet_bytes(table_from_rows("steps", rows), "steps")
    frame = pd.read_parquet(io.BytesIO(content))
    assert frame["logprobs"][0].tolist() == [-0.5, -0.5, -0.5]
    (tmp_path / "steps.parquet").write_bytes(content)
    with duckdb.connect() as connection:
        query = f"select sum(len(response_ids)) from '{tmp_path}/steps.parquet'"
        assert connection.execute(query).fetchone() == (15,)
