"""Settings of the tasks stage.

Where a file lies is execution; what is in it (its digest) and how its columns become tasks is config.
So a moved file with the same content is the same work.
"""

import re
import string
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from schemas.config import ConfigModel

Format = Literal["jsonl", "csv", "parquet"]


def _checked_template(template: str) -> str:
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{template!r} is not a template ({error}); write {{{{ and }}}} for braces") from None
    for _, column, spec, conversion in pieces:
        if column == "" or spec or conversion:
            raise ValueError(f"{template!r}: a placeholder is a column name in braces, as in {{question}}")
    return template


class Extract(ConfigModel):
    """A part of one column, found by a regular expression."""

    column: str
    pattern: str
    """Python regular expression; its first group is taken (the whole match where it has none), without white space
    around it. A row in which it finds nothing is refused."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return pattern


Template = Annotated[str, Field(min_length=1)]


class Fields(ConfigModel):
    """How a row of the source becomes a task. Text with column names in braces is a template."""

    id: Template | None = None
    """Task id; None: a hash of the task's content."""
    instruction: Template = "{instruction}"
    """A column that holds a list of content parts stays one where the template is that column alone."""
    answer: Template | Extract | None = None
    """The reference answer; None: the tasks have none."""
    metadata: dict[str, Template | Extract] | list[str] | Literal["*"] = "*"
    """By name, or a list of columns, or ``"*"``: every column that no other field is made from. A template of one
    column alone keeps the column's type."""

    @field_validator("id", "instruction", "answer", "metadata")
    @classmethod
    def _templates(cls, value: Any) -> Any:
        for item in value.values() if isinstance(value, dict) else [value]:
            if isinstance(item, str):
                _checked_template(item)
        return value


class FileSource(ConfigModel):
    """Rows of one file; where it lies is ``execution.location``, or the benchmark knows."""

    type: Literal["file"] = "file"
    format: Format | None = None
    """None: told by the location's suffix (``.jsonl``, ``.ndjson``, ``.json`` as one object a line, ``.csv``, each
    also with ``.gz``; ``.parquet``)."""
    digest: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the file's bytes. None: filled in when the stage's settings are resolved."""


class GeneratorSource(ConfigModel):
    """Rows made by a function, the same for the same settings."""

    type: Literal["generator"]
    name: str
    """Built in (``arithmetic``, ``games``), or ``module:function`` or ``path/file.py:function``: a function
    ``(seed: int, **params)`` that yields rows (dicts) without end or as many as there are."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function."""
    count: int = Field(ge=1)
    """Rows to take."""
    seed: int = Field(default=0, ge=0)
    version: str | None = None
    """Version of the function's code. None: filled in when the stage's settings are resolved."""


Source = Annotated[FileSource | GeneratorSource, Field(discriminator="type")]


class TasksConfig(ConfigModel):
    """What the tasks are."""

    benchmark: str | None = None
    """Name of a file in ``configs/benchmarks`` or path of such a YAML file; it gives the settings that are None here.
    With a ``source`` of its own: a name for the column, nothing more. None: not a benchmark."""
    split: str | None = None
    """None: the benchmark's default, or no split."""
    source: Source | None = None
    """None: the benchmark's."""
    fields: Fields | None = None
    """None: the benchmark's; without a benchmark, columns that have the names of the fields."""
    limit: int | None = Field(default=None, ge=1)
    """Take the first rows of the source only. None: all."""
    grader: str | None = None
    """Grader that the tasks ask for. None: the benchmark's."""
    agent: str | None = None
    """Agent that the tasks ask for. None: the benchmark's."""


class TasksExecution(ConfigModel):
    """Where files lie and how the work is cut."""

    location: str | None = None
    """Local path or fsspec URL (``s3://``, ``hf://``, ``https://`` …) of the file. None: the benchmark's candidates."""
    data_dir: str | None = None
    """Folder or URL in which benchmarks look for their files first. None: the environment variable ROLLMILL_DATA."""
    shard_rows: int = Field(default=50_000, ge=1)
    """Rows a shard; memory grows with it and not with the file."""

    @field_validator("location", "data_dir")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).password is not None:
            raise ValueError("a URL with a password in it would be stored; use the environment or a credentials file")
        return value
