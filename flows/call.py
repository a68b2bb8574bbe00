"""One stage asked for by hand: inputs as references, the missing ones found through the lineage of those given."""

from collections.abc import Mapping, Sequence
from typing import Any

from flows.engine_block import split_engine
from flows.policies import policy_inputs, role_inputs, with_known_roles
from flows.registry import stage_named
from schemas.artifacts import Manifest
from schemas.config import nearest, validated
from schemas.errors import ConfigError
from stages.artifacts import commit
from stages.artifacts.stage import Stage
from stages.artifacts.store import Store
from stages.rollouts.config import RolloutsConfig


def stage_request(
    store: Store,
    name: str,
    *,
    inputs: Mapping[str, str | Sequence[str]],
    config: Mapping[str, Any],
    execution: Mapping[str, Any],
    seed: int = 0,
    draw: int = 0,
) -> commit.Request:
    """The request for one stage, everything checked that can be checked without work.

    Args:
        inputs: by input name, a reference (``rollouts/3fa9…``, ``RUN:rollouts``, ``RUN@3:rollouts``) or several.
            Inputs left out are taken from what the given ones were made of.
    Raises:
        NotFoundError, KindError: a reference leads nowhere or to another kind of artifact.
        ConfigError: an unknown setting or input, or an input that was not given and cannot be derived.
    """
    stage = stage_named(name)
    unknown = sorted(set(inputs) - set(stage.inputs))
    if unknown:
        raise ConfigError(f"stage {name} has no input {unknown[0]!r}", hint=nearest(unknown[0], list(stage.inputs)))
    if name == "rollouts":
        config, execution = split_engine(config, execution)
    how = validated(stage.Execution, execution, f"execution of {name}")
    settings = stage.resolve(validated(stage.Config, config, name), how)
    given = {
        input_name: [store.resolve(text, kind=stage.inputs[input_name].kind) for text in _listed(texts)]
        for input_name, texts in inputs.items()
    }
    if isinstance(settings, RolloutsConfig):
        settings = with_known_roles(store, settings)
        given = {**role_inputs(store, settings), **given}
    return commit.Request(
        stage=stage, config=settings, execution=how, inputs=_completed(store, stage, given), seed=seed, draw=draw
    )


def _listed(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _completed(store: Store, stage: Stage[Any, Any], given: dict[str, list[Manifest]]) -> dict[str, list[Manifest]]:
    inputs = dict(given)
    for name, spec in stage.inputs.items():
        if name in inputs:
            if len(inputs[name]) > 1 and not spec.many:
                raise ConfigError(f"stage {stage.name} takes one {name!r}, {len(inputs[name])} were given")
            continue
        found = _ancestors(store, [manifest for manifests in given.values() for manifest in manifests], spec.kind)
        if found and (spec.many or len(found) == 1) and not spec.optional:
            inputs[name] = found
        elif not spec.optional:
            several = f": what was given comes from {len(found)} of them" if found else ""
            raise ConfigError(
                f"stage {stage.name} needs the input {name!r} (an artifact of kind {spec.kind}){several}",
                hint=f"give it: {name}=REF",
            )
    if "base" in stage.inputs and "base" not in inputs:
        for policy in inputs.get("policy", []):
            inputs |= policy_inputs(store, policy)
    return inputs


def _ancestors(store: Store, manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    """The nearest artifacts of one kind above each of ``manifests``, each once, in order."""
    found: dict[str, Manifest] = {}
    for manifest in manifests:
        level = [manifest]
        while level:
            above = [(name, ref) for one in level for name, refs in one.inputs.items() for ref in refs]
            parents = [store.manifest(ref) for name, ref in above if name != "base"]  # it follows from its adapter
            hits = [parent for parent in parents if parent.kind == kind]
            if hits:
                found.update({hit.key: hit for hit in hits})
                break
            level = parents
    return list(found.values())
