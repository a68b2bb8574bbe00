"""Policies that answer for some roles beside the stage's own: which they are, and which calls are theirs."""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from schemas.artifacts import Manifest
from schemas.errors import ConfigError
from stages.artifacts.adapters import base_of
from stages.artifacts.stage import Inputs
from stages.rollouts.config import EngineConfig, RolloutsConfig, RolloutsExecution
from stages.rollouts.workers.settings import VllmConfig, VllmExecution

INPUT = "role_policies"
"""The stage's input that holds them, with the bases of those that are adapters."""

Served = TypeVar("Served")


def policy_of(inputs: Inputs, config: RolloutsConfig, name: str) -> Manifest:
    """The policy that ``config.roles`` names for a role.

    Raises:
        ConfigError: it is not among the inputs.
    """
    wanted = config.roles[name].policy
    found = [manifest for manifest in inputs.manifests(INPUT) if str(manifest.ref) == wanted]
    if not found:
        raise ConfigError(f"roles.{name}.policy: {wanted} is not among the inputs", hint=f"give it: {INPUT}={wanted}")
    return found[0]


def check_roles(inputs: Inputs, config: RolloutsConfig, execution: RolloutsExecution) -> None:
    """Refuses policies that are not there or serve no role, and workers that two policies would share.

    Raises:
        ConfigError: with the role, and what to set.
    """
    used = {policy_of(inputs, config, name).key for name in config.roles}
    bases = {base.key for manifest in inputs.manifests(INPUT) if (base := base_of(manifest)) is not None}
    for manifest in inputs.manifests(INPUT):
        if manifest.key not in used | bases:
            raise ConfigError(f"the input {INPUT} has {manifest.ref}, which answers for no role of rollouts.roles")
    for name in sorted(set(execution.role_vllm) - set(config.roles)):
        raise ConfigError(f"execution.rollouts.role_vllm.{name}: there is no such role in rollouts.roles")
    taken: dict[str, str] = {}
    places = ["vllm", *(f"role_vllm.{name}" for name in config.roles)]
    for place, (engine, vllm) in zip(places, engines_of(config, execution), strict=True):
        for url in vllm.workers if isinstance(engine, VllmConfig) and isinstance(vllm.workers, list) else []:
            if url in taken:
                raise ConfigError(
                    f"the server {url} would serve two policies, of execution.rollouts.{taken[url]} and of "
                    f"execution.rollouts.{place}",
                    hint=f"give execution.rollouts.{place}.workers servers of their own",
                )
            taken[url] = place


def engines_of(config: RolloutsConfig, execution: RolloutsExecution) -> list[tuple[EngineConfig, VllmExecution]]:
    """What samples the stage's own policy, then what samples those of ``config.roles``, in their order; with how its
    workers are run, where it is vLLM."""
    of_roles = [(role.engine or config.engine, execution.of_role(name).vllm) for name, role in config.roles.items()]
    return [(config.engine, execution.vllm), *of_roles]


def served_by(role: str, policies: Mapping[str, Served], otherwise: Served) -> Served:
    """What answers for a role: that of its own name, else of the longest name with a ``*`` that fits, else the stage's
    own."""
    if role in policies:
        return policies[role]
    fitting = sorted(filter(lambda name: fits(role, [name]), policies), key=lambda name: (-len(name), name))
    return policies[fitting[0]] if fitting else otherwise


def fits(role: str, names: Iterable[str]) -> bool:
    """Whether a role has one of these names, in which ``*`` stands for any characters."""
    return any(re.fullmatch(".*".join(map(re.escape, name.split("*"))), role, re.DOTALL) for name in names)
