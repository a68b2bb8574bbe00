"""Policies that are adapters: a few weights that belong to another policy, their base, which their manifest names."""

from pathlib import Path

from schemas.artifacts import Manifest, Ref
from schemas.errors import ConfigError, InputError
from stages.artifacts.stage import Inputs

ADAPTER = "adapter"
"""The part of a policy that is an adapter; others have a ``checkpoint``."""


def base_of(policy: Manifest) -> Ref | None:
    """The policy with whole weights that an adapter belongs to; None: the policy is no adapter.

    The first adapter was trained from the base itself, later ones from an adapter, with the base as another input.
    """
    if not policy.table_files(ADAPTER):
        return None
    (base,) = policy.inputs.get("base") or policy.inputs["policy"]
    return base


def check_base(inputs: Inputs) -> None:
    """Refuses the input ``base`` where it is missing, not needed, or not that of the input ``policy``."""
    policy, given = inputs.manifest("policy"), inputs.manifests("base")
    base = base_of(policy)
    if base is None:
        if given:
            raise ConfigError(f"the input 'base' was given, and {policy.ref} has its own weights: it is no adapter")
    elif not given:
        raise ConfigError(f"{policy.ref} is an adapter, and needs its base as the input 'base'", hint=f"base={base}")
    elif given[0].digest != base.digest:
        raise InputError(
            f"{policy.ref} is an adapter of {base} (digest {base.digest[:12]}), and not of the given {given[0].ref} "
            f"(digest {given[0].digest[:12]})",
            hint=f"give base={base}",
        )


def policy_folders(inputs: Inputs, name: str = "policy", artifact: Manifest | None = None) -> tuple[Path, Path | None]:
    """Local folders of a policy: the checkpoint, which for an adapter is its base's, and the adapter; None: none.

    Args:
        artifact: one of several that are given as ``name``, each adapter's base among them; None: the one, whose base
            is the input ``base``.
    Raises:
        ConfigError: an adapter's base is not among them.
    """
    base = base_of(artifact or inputs.manifest(name))
    if base is None:
        return inputs.folder(name, "checkpoint", artifact=artifact), None
    adapter = inputs.folder(name, ADAPTER, artifact=artifact)
    if artifact is None:
        return inputs.folder("base", "checkpoint"), adapter
    for given in inputs.manifests(name):
        if given.digest == base.digest:
            return inputs.folder(name, "checkpoint", artifact=given), adapter
    raise ConfigError(f"{artifact.ref} is an adapter, and its base is not among {name!r}", hint=f"{name}={base}")
