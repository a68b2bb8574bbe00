"""Benchmarks by name: YAML files that say where rows are found and how they become tasks."""

import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from schemas.config import ConfigModel, nearest, validated
from schemas.errors import ConfigError, NotFoundError
from stages.tasks.config import Fields, FileSource, Format, GeneratorSource, Source, TasksConfig, TasksExecution

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "benchmarks"


class Candidate(ConfigModel):
    """One place where a split's file may be found."""

    location: str
    """Local path or fsspec URL; ``{data_dir}`` stands for the setting of that name, and a candidate that uses it is
    passed over where it is not set or the file is not there."""
    format: Format | None = None
    """None: told by the suffix."""


class Benchmark(ConfigModel):
    """What a file in ``configs/benchmarks`` holds."""

    description: str
    """One line: what the tasks are."""
    licence: str | None = None
    """Licence of the rows; None: made here."""
    default_split: str
    splits: dict[str, list[Candidate | str] | Annotated[GeneratorSource, Field()]]
    """Candidates in order of preference, or a generator."""
    fields: Fields
    grader: str
    """Grader that suits the answers."""
    agent: str | None = None
    """Agent that the tasks need; None: any."""


def benchmark_names() -> list[str]:
    """Names of the benchmarks that ship with Rollmill."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_benchmark(name: str) -> Benchmark:
    """A benchmark that ships with Rollmill, or one in a YAML file of the user's (a path that ends in ``.yaml``).

    Raises:
        NotFoundError: with the nearest known name.
        ConfigError: the file is not a benchmark.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise NotFoundError(f"benchmark: there is no file {name}")
    elif name in benchmark_names():
        path = FOLDER / f"{name}.yaml"
    else:
        raise NotFoundError(f"unknown benchmark {name!r}", hint=nearest(name, benchmark_names()))
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a benchmark is a mapping of settings")
    return validated(Benchmark, values, str(path))


def expanded(config: TasksConfig) -> TasksConfig:
    """``config`` with what its benchmark gives; itself where it has a source of its own."""
    if config.source is not None:
        return config.model_copy(update={"fields": config.fields or Fields()})
    if config.benchmark is None:
        raise ConfigError("tasks: no source", hint="name a benchmark, or a source of type file or generator")
    benchmark = load_benchmark(config.benchmark)
    split = config.split or benchmark.default_split
    given = _split(config.benchmark, benchmark, split)
    source: Source = given if isinstance(given, GeneratorSource) else FileSource()
    return config.model_copy(
        update={
            "split": split,
            "source": source,
            "fields": config.fields or benchmark.fields,
            "grader": config.grader or benchmark.grader,
            "agent": config.agent or benchmark.agent,
        }
    )


def candidates(config: TasksConfig, execution: TasksExecution) -> list[Candidate]:
    """Where the file of a file source may be found, in order of preference."""
    if execution.location is not None:
        return [Candidate(location=execution.location)]
    if config.benchmark is None:
        raise ConfigError(
            "tasks: the source is a file, and nothing says where it is", hint="set tasks.execution.location"
        )
    benchmark = load_benchmark(config.benchmark)
    given = _split(config.benchmark, benchmark, config.split or benchmark.default_split)
    if isinstance(given, GeneratorSource):
        raise ConfigError(f"benchmark {config.benchmark} is generated, and has no file", hint="set execution.location")
    data_dir = execution.data_dir or os.environ.get("ROLLMILL_DATA")
    found = [item if isinstance(item, Candidate) else Candidate(location=item) for item in given]
    return [
        item.model_copy(update={"location": item.location.replace("{data_dir}", (data_dir or "").rstrip("/"))})
        for item in found
        if data_dir or "{data_dir}" not in item.location
    ]


def _split(name: str, benchmark: Benchmark, split: str) -> Any:
    if split not in benchmark.splits:
        raise NotFoundError(f"benchmark {name} has no split {split!r}", hint=nearest(split, list(benchmark.splits)))
    return benchmark.splits[split]
