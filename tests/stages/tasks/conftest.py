"""Runs the tasks stage without a store: its shards in order, as the commit protocol would ask for them."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest

from schemas.artifacts import ShardPlan
from stages.artifacts.stage import Inputs, Work
from stages.tasks.stage import STAGE


class NoInputs(Inputs):
    """The inputs of a stage that takes none."""

    def manifests(self, name):
        return []

    def scan(self, name, table, *, artifact=None, shards=None):
        raise KeyError(name)

    def folder(self, name, part, *, artifact=None):
        raise KeyError(name)


@pytest.fixture
def make_tasks(tmp_path):
    """Returns (resolved config, list of shard tables) for settings given as dicts."""

    def run(config, execution=None):
        execution = STAGE.Execution.model_validate(execution or {})
        resolved = STAGE.resolve(STAGE.Config.model_validate(config), execution)
        inputs, work = NoInputs(), Work(key="0" * 64, seed=None, draw=0, scratch=tmp_path)
        STAGE.check(inputs, resolved, execution)
        specs = STAGE.plan(inputs, resolved, execution, work)
        specs = json.loads(json.dumps(specs))
        outputs = [
            STAGE.work(ShardPlan(id=f"{n:05d}", spec=spec), inputs, resolved, execution, work)
            for n, spec in enumerate(specs)
        ]
        return resolved, [output.tables["tasks"] for output in outputs]

    return run


@pytest.fixture
def rows_of(make_tasks):
    """The rows of all shards together, for settings given as dicts."""

    def run(config, execution=None):
        return pa.concat_tables(make_tasks(config, execution)[1]).to_pylist()

    return run


@pytest.fixture
def write(tmp_path):
    """Writes a file of the test's own and gives its path as text; ``.gz`` is compressed."""

    def run(name, content):
        data = content if isinstance(content, bytes) else content.encode()
        path = Path(tmp_path / name)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(path)

    return run
