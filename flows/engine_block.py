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
    rollouts, execution = dict(rollouts), dict(execution)
    engine: Any = rollouts.get("engine")
    kind = _kind_of(engine)
    if kind is not None and isinstance(how := execution.get(kind, {}), dict):
        rollouts["engine"], execution[kind] = _split(engine, how, kind, "engine", kind)
    roles, role_vllm = rollouts.get("roles"), execution.get("role_vllm", {})
    if not isinstance(roles, dict) or not isinstance(role_vllm, dict):
        return rollouts, execution
    roles, role_vllm = dict(roles), dict(role_vllm)
    for name, role in roles.items():
        engine, how = role.get("engine") if isinstance(role, dict) else None, role_vllm.get(name, {})
        if _kind_of(engine) == "vllm" and isinstance(how, dict):
            kept, how = _split(engine, how, "vllm", f"roles.{name}.engine", f"role_vllm.{name}")
            roles[name] = {**role, "engine": kept}
            if how:
                role_vllm[name] = how
    return {**rollouts, "roles": roles}, {**execution, **({"role_vllm": role_vllm} if role_vllm else {})}


def _kind_of(engine: Any) -> str | None:
    """The type of an engine with an execution of its own; None: it has none."""
    kind = engine.get("type") if isinstance(engine, dict) else None
    return kind if isinstance(kind, str) and kind in _ENGINES else None


def _split(
    engine: dict[str, Any], how: dict[str, Any], kind: str, here: str, there: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One engine's block without what belongs to its execution, and the execution with that.

    Args:
        here: where the block stands, in the stage's settings.
        there: where the execution stands, in the stage's.
    """
    config, executed = _ENGINES[kind]
    movable = set(executed.model_fields) - set(config.model_fields)
    known = sorted({*config.model_fields, *movable})
    for unknown in sorted(set(engine) - set(known)):
        raise ConfigError(f"unknown key 'rollouts.{here}.{unknown}'", hint=nearest(unknown, known))
    moved = {name: engine[name] for name in engine.keys() & movable}
    kept = {name: value for name, value in engine.items() if name not in moved}
    _refuse_contradictions(moved, how, here, there)
    how = how | moved
    args, how_args = engine.get("args"), how.get("args", {})
    if isinstance(args, dict) and isinstance(how_args, dict):
        moved_args = {name: args[name] for name in args.keys() & EXECUTION_ARGS}
        _refuse_contradictions(moved_args, how_args, f"{here}.args", f"{there}.args")
        kept["args"] = {name: value for name, value in args.items() if name not in moved_args}
        if how_args | moved_args:
            how |= {"args": how_args | moved_args}
    return kept, how


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


def _refuse_contradictions(moved: Mapping[str, Any], others: Mapping[str, Any], here: str, there: str) -> None:
    for name in sorted(moved.keys() & others.keys()):
        if moved[name] != others[name]:
            raise ConfigError(
                f"rollouts.{here}.{name} is {moved[name]!r}, and execution.rollouts.{there}.{name} is {others[name]!r}",
                hint="set it in one of the two places",
            )
