"""Policies as inputs of a stage: an adapter comes with its base, which nobody has to name."""

from schemas.artifacts import Manifest, Ref
from stages.artifacts.adapters import base_of
from stages.artifacts.store import Store
from stages.rollouts.config import RolloutsConfig
from stages.rollouts.role_policies import INPUT


def policy_inputs(store: Store, policy: Manifest) -> dict[str, list[Manifest]]:
    """The inputs ``policy`` and, where it is an adapter, ``base``."""
    base = base_of(policy)
    return {"policy": [policy]} if base is None else {"policy": [policy], "base": [store.manifest(base)]}


def with_known_roles(store: Store, config: RolloutsConfig) -> RolloutsConfig:
    """The settings with every role's policy by its key, whatever name it was given by.

    Raises:
        NotFoundError, KindError: a reference leads nowhere or to another kind of artifact.
    """
    roles = {
        name: role.model_copy(update={"policy": str(store.resolve(role.policy, kind="policy").ref)})
        for name, role in config.roles.items()
    }
    return config.model_copy(update={"roles": roles})


def role_inputs(store: Store, config: RolloutsConfig) -> dict[str, list[Manifest]]:
    """The input with the policies of ``config.roles``, each once, and their bases."""
    found: dict[Ref, Manifest] = {}
    for name in sorted(config.roles):
        policy = store.resolve(config.roles[name].policy, kind="policy")
        base = base_of(policy)
        for manifest in [policy] if base is None else [policy, store.manifest(base)]:
            found[manifest.ref] = manifest
    return {INPUT: list(found.values())} if found else {}
