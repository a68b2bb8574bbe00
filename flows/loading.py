"""Config files: YAML, dotted overrides from the command line, and messages that name file, line and key."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from schemas.config import ConfigModel, validated
from schemas.errors import ConfigError, NotFoundError

Model = TypeVar("Model", bound=ConfigModel)


def load_config(
    model: type[Model],
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    arranged: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Model:
    """The config in the YAML file ``path`` with ``key.sub=value`` overrides applied.

    Args:
        arranged: puts settings where the model has them, before they are validated.
    Raises:
        NotFoundError: the file does not exist.
        ConfigError: it is no YAML mapping, or a setting is unknown, malformed or out of bounds.
    """
    values = arranged(with_overrides(read_yaml(path), overrides))
    return validated(model, values, str(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; errors name the file and the line."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(str(other) for other in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        raise NotFoundError(f"no config file {file}", hint=f"there are: {', '.join(near)}" if near else None) from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder; give the YAML file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{file}{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping of settings, found {type(values).__name__}")
    return values


def with_overrides(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of ``values`` with each ``dotted.key=value`` set; values are read as YAML, templates as text.

    Raises:
        ConfigError: an override has no ``=``, or walks through a setting that is no mapping.
    """
    result = _copied(values)
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not dotted.strip():
            raise ConfigError(f"override {override!r} is not of the form key=value")
        *parents, last = dotted.strip().split(".")
        place = result
        for parent in parents:
            inner = place.get(parent)
            if inner is None:
                inner = place[parent] = {}
            elif not isinstance(inner, dict):
                raise ConfigError(f"override {override!r}: {parent!r} is {inner!r}, not a group of settings")
            place = inner
        place[last] = _read_value(text)
    return result


def _read_value(text: str) -> Any:
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError:
        return text
    # "{question}" is a template: as YAML it would be a mapping of "question" to nothing.
    return text if isinstance(value, dict) and value and ":" not in text else value


def _copied(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _copied(value) for key, value in values.items()}
    return list(values) if isinstance(values, list) else values


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader keeps the last of two equal keys in silence; a config with two is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value != "<<":
                if key_node.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key_node.value!r} stands twice", problem_mark=key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


# YAML 1.1, which the library reads, takes 1e-4 for text because it has no point.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)
