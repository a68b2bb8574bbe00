"""A policy as the input of a stage: an adapter comes with its base, which nobody has to name."""

from schemas.artifacts import Manifest
from stages.artifacts.adapters import base_of
from stages.artifacts.store import Store


def policy_inputs(store: Store, policy: Manifest) -> dict[str, list[Manifest]]:
    """The inputs ``policy`` and, where it is an adapter, ``base``."""
    base = base_of(policy)
    return {"policy": [policy]} if base is None else {"policy": [policy], "base": [store.manifest(base)]}
