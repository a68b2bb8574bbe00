"""The tasks stage: rows of a file or a generator become the ``tasks`` table.

The whole source is read once before anything is written, so that a bad row or a repeated id is
refused early; then each shard reads its own segment. Memory grows with a shard and not with the file.
"""

from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

from schemas.artifacts import ShardPlan
from schemas.errors import ConfigError, InputError, NotFoundError, RollmillError
from schemas.tables import TASKS
from stages.artifacts.stage import Inputs, InputSpec, ShardOutput, Stage, Work
from stages.tasks import rows, sources
from stages.tasks.benchmarks import candidates, expanded
from stages.tasks.config import FileSource, Format, GeneratorSource, TasksConfig, TasksExecution
from stages.tasks.generators import generator_named, generator_version
from stages.tasks.mapping import Mapper, TaskRow, id_hash

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip


class TasksStage(Stage[TasksConfig, TasksExecution]):
    """A benchmark or data set as rows of the ``tasks`` table."""

    name: ClassVar[str] = "tasks"
    kind: ClassVar[str] = "tasks"
    version: ClassVar[int] = 1
    stochastic: ClassVar[bool] = False
    inputs: ClassVar[dict[str, InputSpec]] = {}
    tables: ClassVar[tuple[str, ...]] = ("tasks",)
    Config: ClassVar[type[TasksConfig]] = TasksConfig
    Execution: ClassVar[type[TasksExecution]] = TasksExecution

    def resolve(self, config: TasksConfig, execution: TasksExecution) -> TasksConfig:
        """Fills in the benchmark's settings, the file's format and digest, and the generator's version."""
        config = expanded(config)
        if isinstance(config.source, GeneratorSource):
            update: dict[str, Any] = {"version": generator_version(config.source.name)}
        else:
            assert config.source is not None
            location, digest, format_ = _find(config, execution)
            update = {"digest": digest, "format": config.source.format or format_ or _format_of(location)}
        return config.model_copy(update={"source": config.source.model_copy(update=update)})

    def check(self, inputs: Inputs, config: TasksConfig, execution: TasksExecution) -> None:
        seen = array("Q")
        for _, task in _tasks(config, execution, None):
            seen.append(id_hash(task["task_id"]))
        if not seen:
            raise InputError(f"{_name(config, execution)} has no rows")
        _refuse_repeated_ids(seen, config, execution)

    def plan(self, inputs: Inputs, config: TasksConfig, execution: TasksExecution, work: Work) -> list[dict[str, Any]]:
        if isinstance(config.source, GeneratorSource):
            count = min(config.source.count, config.limit or config.source.count)
            starts = range(0, count, execution.shard_rows)
            return [{"start": start, "n_rows": min(execution.shard_rows, count - start)} for start in starts]
        location, path, format_ = _file(config, execution)
        found = rows.segments(path, format_, location, execution.shard_rows, config.limit)
        return [segment.model_dump() for segment in found]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: TasksConfig, execution: TasksExecution, work: Work
    ) -> ShardOutput:
        import pyarrow as pa

        found = sorted((task for _, task in _tasks(config, execution, shard.spec)), key=lambda task: task["task_id"])
        table = pa.Table.from_pylist(found, schema=TASKS.schema)
        work.progress(len(found), len(found))
        n_answers = len(found) - table.column("answer").null_count
        return ShardOutput({"tasks": table}, summary={"n_tasks": len(found), "n_answers": n_answers})


def _tasks(
    config: TasksConfig, execution: TasksExecution, spec: dict[str, Any] | None
) -> Iterator[tuple[str, TaskRow]]:
    """Place and task of each row of one shard; of all rows (``limit`` at most) where ``spec`` is None."""
    mapper = Mapper(config, _name(config, execution))
    for place, row in islice(_rows(config, execution, spec), config.limit if spec is None else None):
        yield place, mapper.task(place, row)


def _rows(config: TasksConfig, execution: TasksExecution, spec: dict[str, Any] | None) -> Iterator[rows.Row]:
    if isinstance(config.source, GeneratorSource):
        yield from _generated(config.source, spec or {"start": 0, "n_rows": config.source.count})
    else:
        location, path, format_ = _file(config, execution)
        yield from rows.read(path, format_, location, rows.Segment.model_validate(spec) if spec else None)


def _generated(source: GeneratorSource, spec: dict[str, Any]) -> Iterator[rows.Row]:
    start, stop = spec["start"], spec["start"] + spec["n_rows"]
    try:
        made = iter(generator_named(source.name)(source.seed, **source.params))
        for number, row in enumerate(islice(made, start, stop), start=start + 1):
            if not isinstance(row, dict):
                raise InputError(f"generator {source.name}, row {number}: a {type(row).__name__}, not a dict")
            yield f"row {number}", row
            start = number
    except RollmillError:
        raise
    except Exception as error:
        raise InputError(f"generator {source.name}: {type(error).__name__}: {error}") from error
    if start < stop:
        raise ConfigError(
            f"generator {source.name} has only {start} rows for these params, and {source.count} are asked for",
            hint="lower source.count, or widen source.params",
        )


def _find(config: TasksConfig, execution: TasksExecution) -> tuple[str, str, Format | None]:
    """The first candidate that can be read: its location, digest, and format where the candidate tells."""
    tried: list[RollmillError] = []
    for candidate in candidates(config, execution):
        try:
            return candidate.location, sources.content_digest(candidate.location), candidate.format
        except (NotFoundError, InputError) as error:
            tried.append(error)
    if len(tried) == 1 and execution.location is not None:
        raise tried[0]
    raise NotFoundError(
        f"benchmark {config.benchmark}, split {config.split}: no file can be read\n  "
        + "\n  ".join(error.message for error in tried),
        hint="set execution.data_dir (or ROLLMILL_DATA) to the folder of your data sets, or execution.location",
    )


def _file(config: TasksConfig, execution: TasksExecution) -> tuple[str, Any, str]:
    """Name for messages, local path and format of a resolved file source."""
    source = config.source
    if not isinstance(source, FileSource) or source.digest is None or source.format is None:
        raise ConfigError("tasks: the settings are not resolved", hint="call STAGE.resolve before the key is made")
    changed: list[RollmillError] = []
    for candidate in candidates(config, execution):
        try:
            return candidate.location, sources.local_file(candidate.location, source.digest), source.format
        except (NotFoundError, InputError) as error:
            changed.append(error)
    raise changed[0]


def _name(config: TasksConfig, execution: TasksExecution) -> str:
    if isinstance(config.source, GeneratorSource):
        return f"generator {config.source.name}"
    return _file(config, execution)[0]


def _format_of(location: str) -> Format:
    base = location.split("?")[0].removesuffix(".gz")
    for suffix, format_ in _SUFFIXES.items():
        if base.endswith(suffix):
            return format_
    raise ConfigError(
        f"{location}: the suffix tells no format",
        hint=f"set source.format ({', '.join(sorted(set(_SUFFIXES.values())))})",
    )


def _refuse_repeated_ids(hashes: "array[int]", config: TasksConfig, execution: TasksExecution) -> None:
    import numpy as np

    values, counts = np.unique(np.frombuffer(hashes, dtype=np.uint64), return_counts=True)
    suspects = set(values[counts > 1].tolist())
    first: dict[str, str] = {}
    for place, task in _tasks(config, execution, None) if suspects else ():
        task_id = task["task_id"]
        if id_hash(task_id) not in suspects:
            continue
        if task_id in first:
            given = config.fields is not None and config.fields.id is not None
            said = f"the task id {task_id!r}" if given else "the same content, and so the same task id,"
            raise InputError(
                f"{_name(config, execution)}, {place}: {said} was on {first[task_id]} already",
                hint=None if given else "remove the repeated row, or map a column with unique values to fields.id",
            )
        first[task_id] = place


STAGE = TasksStage()
