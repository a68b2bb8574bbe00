"""Benchmarks are found by name and read from where they lie; generators repeat themselves exactly."""

import json

import pyarrow as pa
import pytest

from schemas.errors import ConfigError, InputError, NotFoundError
from stages.tasks.benchmarks import benchmark_names, candidates, expanded, load_benchmark
from stages.tasks.config import TasksConfig, TasksExecution
from stages.tasks.generators import arithmetic
from stages.tasks.stage import STAGE

SUMS = {"type": "generator", "name": "arithmetic", "count": 50, "params": {"high": 9}}


def test_every_benchmark_file_is_valid_and_describes_itself():
    assert {"arithmetic", "gsm8k"} <= set(benchmark_names())
    for name in benchmark_names():
        benchmark = load_benchmark(name)
        assert benchmark.default_split in benchmark.splits
        assert benchmark.description
        for split in benchmark.splits:
            assert expanded(TasksConfig(benchmark=name, split=split)).source is not None


def test_unknown_benchmarks_and_splits_are_refused_with_the_nearest():
    with pytest.raises(NotFoundError, match="did you mean 'gsm8k'"):
        load_benchmark("gsm8")
    with pytest.raises(NotFoundError, match="did you mean 'test'"):
        expanded(TasksConfig(benchmark="gsm8k", split="tests"))
    with pytest.raises(NotFoundError, match="no file"):
        load_benchmark("nowhere/mine.yaml")
    with pytest.raises(ConfigError, match="no source"):
        expanded(TasksConfig())


def test_a_benchmark_of_ones_own_is_a_yaml_file(tmp_path, write, rows_of):
    write("mine.jsonl", '{"question": "x", "n": 1}\n')
    path = write(
        "mine.yaml",
        "description: mine\ndefault_split: all\ngrader: exact\n"
        "splits: {all: ['{data_dir}/mine.jsonl']}\nfields: {instruction: '{question}'}\n",
    )
    (row,) = rows_of({"benchmark": path}, {"data_dir": str(tmp_path)})
    assert (row["benchmark"], row["split"], row["instruction"], row["grader"]) == ("mine", "all", "x", "exact")
    assert row["metadata"] == '{"n":1}'


def test_a_malformed_benchmark_file_is_refused(write):
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_benchmark(write("a.yaml", "{"))
    with pytest.raises(ConfigError, match="unknown key 'spilts'"):
        load_benchmark(write("b.yaml", "spilts: {}"))


def test_local_data_is_preferred_to_the_hub_and_only_where_it_is_set(monkeypatch):
    config = TasksConfig(benchmark="gsm8k")
    monkeypatch.delenv("ROLLMILL_DATA", raising=False)
    hub = "hf://datasets/openai/gsm8k/main/test-00000-of-00001.parquet"
    assert [item.location for item in candidates(config, TasksExecution())] == [hub]
    monkeypatch.setenv("ROLLMILL_DATA", "/from/env")
    assert candidates(config, TasksExecution())[0].location == "/from/env/gsm8k/test.jsonl"
    assert candidates(config, TasksExecution(data_dir="/set/"))[0].location == "/set/gsm8k/test.jsonl"


def test_when_no_candidate_can_be_read_each_is_named(write, make_tasks, tmp_path):
    path = write(
        "mine.yaml",
        "description: mine\ndefault_split: all\ngrader: exact\n"
        "splits: {all: ['{data_dir}/a.jsonl', '/nowhere/b.jsonl']}\nfields: {}\n",
    )
    with pytest.raises(NotFoundError, match=r"(?s)a\.jsonl.*nowhere/b\.jsonl.*ROLLMILL_DATA"):
        make_tasks({"benchmark": path}, {"data_dir": str(tmp_path)})


@pytest.mark.shared_data
def test_the_real_gsm8k_rows_become_tasks(rows_of, shared_data):
    execution = {"data_dir": str(shared_data), "shard_rows": 500}
    test = rows_of({"benchmark": "gsm8k"}, execution)
    train = rows_of({"benchmark": "gsm8k", "split": "train"}, execution)
    assert (len(test), len(train)) == (1319, 7473)
    janet = next(row for row in test if row["instruction"].startswith("Janet\u2019s ducks"))
    assert janet["answer"] == "18"
    assert janet["instruction"].endswith("after ####.")
    assert len(rows_of({"benchmark": "gsm8k", "limit": 16}, execution)) == 16
    ids = {row["task_id"] for row in test + train}
    assert len(ids) == 1319 + 7473


def test_arithmetic_is_right_unique_and_the_same_every_time(rows_of):
    config = {"source": SUMS, "fields": {"instruction": "{expression}", "answer": "{answer}"}}
    found = rows_of(config)
    assert found == rows_of(config, {"shard_rows": 7})[:50] or sorted(found, key=lambda row: row["task_id"]) == sorted(
        rows_of(config, {"shard_rows": 7}), key=lambda row: row["task_id"]
    )
    assert len({row["instruction"] for row in found}) == 50
    assert all(eval(row["instruction"]) == int(row["answer"]) for row in found)
    other = rows_of({**config, "source": {**SUMS, "seed": 1}})
    assert {row["instruction"] for row in other} != {row["instruction"] for row in found}


def test_longer_expressions_follow_the_order_of_operations():
    import itertools

    for row in itertools.islice(arithmetic(3, terms=4, high=12), 300):
        assert eval(row["expression"]) == int(row["answer"])
    for row in itertools.islice(arithmetic(3, operators="-", negative=False), 300):
        assert int(row["answer"]) >= 0


def test_held_out_expressions_are_in_no_training_set():
    train = {row["expression"] for row in arithmetic(0, operators="+", high=19, held_out_share=0.25)}
    test = {row["expression"] for row in arithmetic(5, operators="+", high=19, held_out_share=0.25, held_out=True)}
    assert not train & test
    assert len(train) + len(test) == 400
    assert 60 < len(test) < 140


def test_a_generator_that_runs_dry_says_how_many_there_are(make_tasks):
    small = {"type": "generator", "name": "arithmetic", "params": {"operators": "+", "high": 2}, "count": 10}
    config = {"source": small, "fields": {"instruction": "{expression}"}}
    with pytest.raises(ConfigError, match="only 9 rows"):
        make_tasks(config)
    assert sum(map(len, make_tasks({**config, "limit": 9})[1])) == 9


def test_a_generator_of_ones_own_is_versioned_by_its_source(write, make_tasks):
    path = write(
        "mine.py", "def rows(seed, start=0):\n    for n in range(start, 99):\n        yield {'instruction': str(n)}\n"
    )
    config = {"source": {"type": "generator", "name": f"{path}:rows", "count": 3, "params": {"start": 5}}}
    resolved, tables = make_tasks(config, {"shard_rows": 2})
    assert set(pa.concat_tables(tables).column("instruction").to_pylist()) == {"5", "6", "7"}
    write("mine.py", "def rows(seed, start=0):\n    yield {'instruction': 'x'}\n    raise OSError('gone')\n")
    assert STAGE.resolve(STAGE.Config.model_validate(config), STAGE.Execution()).source != resolved.source
    with pytest.raises(InputError, match="OSError: gone"):
        make_tasks(config)
    write("mine.py", "def rows(seed, start=0):\n    yield 'x'\n")
    with pytest.raises(InputError, match="row 1: a str, not a dict"):
        make_tasks(config)


def test_unknown_generators_and_params_are_refused(make_tasks):
    with pytest.raises(NotFoundError, match="did you mean 'arithmetic'"):
        make_tasks({"source": {**SUMS, "name": "arithmetics"}})
    with pytest.raises(InputError, match="unexpected keyword argument 'hihg'"):
        make_tasks({"source": {**SUMS, "params": {"hihg": 3}}})
    with pytest.raises(ConfigError, match="operators"):
        make_tasks({"source": {**SUMS, "params": {"operators": "/"}}})


def test_games_are_the_same_every_time_and_training_and_test_share_none(rows_of):
    def seeds(**params):
        source = {"type": "generator", "name": "games", "params": {"environment": "sokoban", **params}, "count": 50}
        rows = rows_of({"source": source, "fields": {"instruction": "Play."}})
        found = [json.loads(row["metadata"]) for row in rows]
        assert {row["environment"] for row in found} == {"sokoban"}
        return [row["seed"] for row in found]

    assert seeds() == seeds()
    assert len({*seeds(), *seeds(held_out=True)}) == 100
    assert {row["agent"] for row in rows_of({"benchmark": "frozen_lake", "limit": 3})} == {"environment"}
