"""The engine in one block: ``engine: {type: vllm, workers: 2, args: {…}}``.

What changes no sample is moved to where it is kept, ``execution.rollouts.vllm`` (or ``endpoint``), before anything is
validated: no key depends on it.
"""

from collections.abc import Mapping
from typing import Any

from schemas.config import ConfigModel, nearest
from schemas.errors import ConfigError
from stages.rollouts.endpoints.settings import EndpointConfig, EndpointExecution
from stages.rollouts.workers.settings import EXECUTION_ARGS, VllmConfig, VllmExecution

_ENGINES: dict[str, tuple[type[ConfigModel], type[ConfigModel]]] = {
    "vllm": (VllmConfig, VllmExecution),
    "endpoint": (EndpointConfig, EndpointExecution),
}
"""Types of engines with an execution of their own, which is called as the type is."""


def split_engine(rollouts: Mapping[str, Any], execution: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a rollouts stage and of its execution, each in its place.

    Raises:
        ConfigError: a setting is unknown, or stands in both places with different values.
    """
    engine = rollouts.get("engine")
    kind = engine.get("type") if isinstance(engine, dict) else None
    how = execution.get(kind, {}) if kind in _ENGINES else None
    if not isinstance(engine, dict) or not isinstance(kind, str) or not isinstance(how, dict):
        return dict(rollouts), dict(execution)
    config, executed = _ENGINES[kind]
    movable = set(executed.model_fields) - set(config.model_fields)
    known = sorted({*config.model_fields, *movable})
    for unknown in sorted(set(engine) - set(known)):
        raise ConfigError(f"unknown key 'rollouts.engine.{unknown}'", hint=nearest(unknown, known))
    moved = {name: engine[name] for name in engine.keys() & movable}
    kept = {name: value for name, value in engine.items() if name not in moved}
    _refuse_contradictions(moved, how, kind)
    how = how | moved
    args, how_args = engine.get("args"), how.get("args", {})
    if isinstance(args, dict) and isinstance(how_args, dict):
        moved_args = {name: args[name] for name in args.keys() & EXECUTION_ARGS}
        _refuse_contradictions(moved_args, how_args, kind, "args.")
        kept["args"] = {name: value for name, value in args.items() if name not in moved_args}
        how |= {"args": how_args | moved_args}
    return {**rollouts, "engine": kept}, {**execution, kind: how}


def split_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a whole recipe."""
    rollouts, execution = recipe.get("rollouts"), recipe.get("execution") or {}
    if not isinstance(rollouts, dict) or not isinstance(execution, dict):
        return dict(recipe)
    of_rollouts = execution.get("rollouts") or {}
    if not isinstance(of_rollouts, dict):
        return dict(recipe)
    rollouts, of_rollouts = split_engine(rollouts, of_rollouts)
    return {**recipe, "rollouts": rollouts, "execution": {**execution, "rollouts": of_rollouts}}


def _refuse_contradictions(moved: Mapping[str, Any], there: Mapping[str, Any], kind: str, prefix: str = "") -> None:
    for name in sorted(moved.keys() & there.keys()):
        if moved[name] != there[name]:
            raise ConfigError(
                f"rollouts.engine.{prefix}{name} is {moved[name]!r}, and execution.rollouts.{kind}.{prefix}{name} is "
                f"{there[name]!r}",
                hint="set it in one of the two places",
            )
