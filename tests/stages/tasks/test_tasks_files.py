"""Files of every format become the same tasks, whole or in shards; bad ones are refused by name and line."""

import csv
import io
import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.canonical import canonical_hash
from schemas.config import validated
from schemas.errors import ConfigError, InputError, NotFoundError
from schemas.records import Task
from schemas.tables import TASKS
from stages.tasks import rows
from stages.tasks.stage import STAGE

ROWS = [
    {"q": "one\u2028two", "a": "so 1 #### 70,000", "n": "1"},
    {"q": "zwei \u0085 drei", "a": "#### -2", "n": "2"},
    {"q": 'with "quotes",\nand a line', "a": "none #### x ", "n": "3"},
    {"q": "last", "a": "#### 4", "n": "4"},
]
FIELDS = {"id": "task-{n}", "instruction": "{q}\nAnswer.", "answer": {"column": "a", "pattern": "#### *(.+)"}}
CONFIG = {"source": {"type": "file"}, "fields": FIELDS, "grader": "numeric", "split": "dev"}


def as_jsonl(items):
    return "\n".join(json.dumps(item, ensure_ascii=False) for item in items) + "\n"


def as_csv(items):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(items[0]), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(items)
    return text.getvalue()


def as_parquet(items, row_group_size=2):
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(items), sink, row_group_size=row_group_size)
    return sink.getvalue()


FORMS = {"t.jsonl": as_jsonl, "t.jsonl.gz": as_jsonl, "t.csv": as_csv, "t.csv.gz": as_csv, "t.parquet": as_parquet}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shard_rows", [1, 2, 3, 100])
def test_every_format_gives_the_same_tasks_in_any_shards(write, make_tasks, name, shard_rows):
    location = write(name, FORMS[name](ROWS))
    _, tables = make_tasks(CONFIG, {"location": location, "shard_rows": shard_rows})
    assert all(table.schema.equals(TASKS.schema, check_metadata=True) for table in tables)
    found = pa.concat_tables(tables).to_pylist()
    assert [row["task_id"] for row in found] == ["task-1", "task-2", "task-3", "task-4"]
    assert [row["answer"] for row in found] == ["70,000", "-2", "x", "4"]
    assert found[0]["instruction"] == "one\u2028two\nAnswer."
    assert found[2]["instruction"] == 'with "quotes",\nand a line\nAnswer.'
    assert found[0]["metadata"] is None
    assert (found[0]["grader"], found[0]["split"], found[0]["agent"]) == ("numeric", "dev", None)
    if shard_rows == 1 and name != "t.parquet":
        assert len(tables) == 4


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(alphabet='ab",\n\r\u2028\x85 é', max_size=8), min_size=1, max_size=12),
    size=st.integers(1, 5),
    name=st.sampled_from(["x.jsonl", "x.csv", "x.parquet"]),
)
def test_segments_read_one_by_one_are_the_file(tmp_path_factory, texts, size, name):
    items = [{"k": str(n), "q": text} for n, text in enumerate(texts)]
    content = FORMS["t" + name[1:]](items)
    path = tmp_path_factory.mktemp("segments") / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    format_ = name[2:]
    whole = list(rows.read(path, format_, name))
    assert [row["q"] for _, row in whole] == texts
    pieces = rows.segments(path, format_, name, size, None)
    assert [item for piece in pieces for item in rows.read(path, format_, name, piece)] == whole


def test_a_parquet_file_of_many_batches_is_cut_at_row_groups(write, make_tasks):
    items = [{"q": f"question {n}", "a": f"#### {n}", "n": f"{n:04d}"} for n in range(3000)]
    location = write("t.parquet", as_parquet(items, row_group_size=700))
    _, tables = make_tasks(CONFIG, {"location": location, "shard_rows": 1500})
    assert [len(table) for table in tables] == [1400, 1400, 200]
    assert pa.concat_tables(tables).column("answer").to_pylist() == [str(n) for n in range(3000)]
    _, tables = make_tasks({**CONFIG, "limit": 1401}, {"location": location, "shard_rows": 1400})
    assert [len(table) for table in tables] == [1400, 1]


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(write, rows_of, name):
    found = rows_of(CONFIG, {"location": write(name, b"\xef\xbb\xbf" + FORMS[name](ROWS).encode())})
    assert [row["task_id"] for row in found] == ["task-1", "task-2", "task-3", "task-4"]


def test_content_parts_numbers_and_other_columns_are_kept(write, rows_of):
    parts = [{"type": "text", "text": "look"}]
    items = [{"q": parts, "a": 7, "more": [1, {"x": None}], "score": 0.5}]
    (row,) = rows_of(
        {"source": {"type": "file"}, "fields": {"instruction": "{q}", "answer": "{a}"}},
        {"location": write("t.jsonl", as_jsonl(items))},
    )
    task = Task.from_row(row)
    assert task.instruction == parts
    assert task.answer == "7"
    assert task.metadata == {"more": [1, {"x": None}], "score": 0.5}


def test_ids_without_an_id_column_depend_on_content_only(write, rows_of):
    config = {"source": {"type": "file"}, "fields": {"instruction": "{q}"}}
    forward = rows_of(config, {"location": write("a.jsonl", as_jsonl(ROWS))})
    backward = rows_of(config, {"location": write("b.jsonl", as_jsonl(ROWS[::-1]))})
    assert forward == backward


def test_the_key_knows_content_and_not_place(write, make_tasks):
    one = make_tasks(CONFIG, {"location": write("one.jsonl", as_jsonl(ROWS))})[0]
    moved = make_tasks(CONFIG, {"location": write("two.jsonl", as_jsonl(ROWS))})[0]
    other = make_tasks(CONFIG, {"location": write("one.jsonl", as_jsonl(ROWS[:2]))})[0]
    assert canonical_hash(one) == canonical_hash(moved) != canonical_hash(other)


def test_a_file_that_changes_after_it_was_resolved_is_refused(write, make_tasks):
    location = write("t.jsonl", as_jsonl(ROWS))
    resolved, _ = make_tasks(CONFIG, {"location": location})
    write("t.jsonl", as_jsonl(ROWS[:3]))
    with pytest.raises(InputError, match="has changed"):
        STAGE.check(None, resolved, STAGE.Execution(location=location))  # type: ignore[arg-type]


def test_a_remote_file_is_fetched_once_and_found_by_its_digest(write, make_tasks, monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    with fsspec.open("memory://here/t.jsonl", "wb") as file:
        file.write(as_jsonl(ROWS).encode())
    execution = {"location": "memory://here/t.jsonl", "shard_rows": 1}
    resolved, tables = make_tasks(CONFIG, execution)
    assert sum(len(table) for table in tables) == 4
    fsspec.filesystem("memory").rm("/here/t.jsonl")
    STAGE.check(None, resolved, STAGE.Execution.model_validate(execution))  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match=r"memory://here/t\.jsonl"):
        make_tasks(CONFIG, execution)


def test_limit_takes_the_first_rows_and_reads_no_further(write, rows_of):
    location = write("t.jsonl", as_jsonl(ROWS[:2]) + "not JSON\n")
    found = rows_of({**CONFIG, "limit": 2}, {"location": location, "shard_rows": 1})
    assert [row["task_id"] for row in found] == ["task-1", "task-2"]


BAD = {
    "invalid JSON": ("t.jsonl", as_jsonl(ROWS[:1]) + '\n{"q": }\n', r"t\.jsonl, line 3: invalid JSON at column 7"),
    "not an object": ("t.jsonl", "[1]\n", r"line 1: a JSON list"),
    "missing column": ("t.jsonl", as_jsonl(ROWS) + '{"q": "x", "n": "9"}\n', r"line 5: there is no column 'a'.*q, n"),
    "null instruction": ("t.jsonl", '{"q": null, "a": "#### 1", "n": "9"}\n', r"line 1: column 'q' is null"),
    "null id": ("t.jsonl", '{"q": "x", "a": "#### 1", "n": null}\n', r"line 1: column 'n' is null"),
    "no match": ("t.jsonl", '{"q": "x", "a": "1", "n": 1}\n', r"line 1: column 'a' holds nothing that matches"),
    "repeated id": ("t.csv", as_csv([*ROWS, ROWS[1]]), r"line 7: the task id 'task-2' was on line 3"),
    "no rows": ("t.jsonl", "\n\n", r"has no rows"),
    "empty csv": ("t.csv", "", r"has no rows"),
    "not UTF-8": ("t.jsonl", as_jsonl(ROWS[:1]).encode() + b'{"q": "\xff"}\n', r"line 2: not UTF-8 \(byte 0xff"),
    "short csv row": ("t.csv", as_csv(ROWS) + "x,y\r\n", r"line 7: 2 columns, where the header names 3"),
    "open quote": ("t.csv", as_csv(ROWS) + '"x', r"line 7: invalid CSV"),
    "cut gzip": ("t.jsonl", __import__("gzip").compress(as_jsonl(ROWS * 99).encode())[:-20], r"not a complete gzip"),
    "cut parquet": ("t.parquet", as_parquet(ROWS)[:-30], r"t\.parquet cannot be read as Parquet"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_by_name_and_line(write, make_tasks, case):
    name, content, said = BAD[case]
    location = write(name, content)
    with pytest.raises(InputError, match=said) as caught:
        make_tasks(CONFIG, {"location": location})
    assert location in str(caught.value)


def test_rows_that_repeat_without_ids_are_refused(write, make_tasks):
    config = {"source": {"type": "file"}, "fields": {"instruction": "{q}"}}
    with pytest.raises(InputError, match="line 5: the same content, and so the same task id, was on line 1"):
        make_tasks(config, {"location": write("t.jsonl", as_jsonl([*ROWS, ROWS[0]]))})


def test_a_damaged_page_of_a_parquet_file_is_refused(write, make_tasks):
    content = bytearray(as_parquet(ROWS * 50, row_group_size=20))
    content[10:40] = bytes(30)
    with pytest.raises(InputError, match="the Parquet file cannot be read"):
        make_tasks(CONFIG, {"location": write("t.parquet", bytes(content))})


def test_a_missing_file_and_an_unknown_suffix_are_named(write, make_tasks):
    with pytest.raises(NotFoundError, match="nowhere"):
        make_tasks(CONFIG, {"location": "/nowhere/t.jsonl"})
    with pytest.raises(ConfigError, match="suffix tells no format"):
        make_tasks(CONFIG, {"location": write("t.data", as_jsonl(ROWS))})
    with pytest.raises(InputError, match="Protocol not known: nosuch"):
        make_tasks(CONFIG, {"location": "nosuch://x/t.jsonl"})
    with pytest.raises(ConfigError, match="nothing says where"):
        make_tasks(CONFIG)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fields": {"instruction": "{}"}}, "a column name in braces"),
        ({"fields": {"instruction": "{q!r}"}}, "a column name in braces"),
        ({"fields": {"instruction": "{q"}}, "not a template"),
        ({"fields": {"answer": {"column": "a", "pattern": "("}}}, "not a regular expression"),
        ({"fields": {"instructions": "{q}"}}, "did you mean 'instruction'"),
        ({"source": {"type": "table"}}, "file"),
        ({"limit": 0}, "greater than or equal to 1"),
    ],
)
def test_wrong_settings_are_refused_by_the_model(config, said):
    with pytest.raises(ConfigError, match=said):
        validated(STAGE.Config, config, "test")


def test_a_url_with_a_password_is_refused():
    with pytest.raises(ConfigError, match="password"):
        validated(STAGE.Execution, {"location": "https://me:secret@host/t.jsonl"}, "test")
