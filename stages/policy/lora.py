"""Adapters outside of the trainer: what an update with one is refused for, and an adapter merged with its base."""

import json
import shutil
from pathlib import Path

from schemas.artifacts import Manifest
from schemas.errors import ConfigError, InputError
from stages.artifacts.adapters import ADAPTER, base_of
from stages.artifacts.stage import Inputs
from stages.policy.checkpoint import ADAPTER_CONFIG, ADAPTER_FILE, ADAPTER_PREFIX, companions_of
from stages.policy.quiet import quiet_libraries
from stages.policy.settings import LoraConfig


def check_lora(inputs: Inputs, lora: LoraConfig | None) -> None:
    """Refuses settings that do not fit the input ``policy``, and a reference that belongs to another base."""
    policy = inputs.manifest("policy")
    base = base_of(policy)
    if base is not None:
        _check_settings(policy, inputs, lora)
    for reference in inputs.manifests("reference"):
        its_base = base_of(reference)
        if its_base is not None and (base is None or its_base.digest != base.digest):
            raise InputError(
                f"the reference {reference.ref} is an adapter of {its_base}, and the policy is none of the same base",
                hint="give a reference with weights of its own, or export this one and import it again",
            )


def merge(checkpoint: Path, adapter: Path, folder: Path) -> None:
    """Writes a checkpoint whose weights are those of the base with the adapter added, in the base's number format.

    Args:
        checkpoint: folder of the base.
        adapter: folder of the adapter.
        folder: is made.
    """
    quiet_libraries()
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    described = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    stored = load_file(adapter / ADAPTER_FILE)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    with torch.no_grad():
        for name in [name for name in stored if name.endswith(".lora_A.weight")]:
            layer = name.removesuffix(".lora_A.weight")
            a, b = stored[name].float(), stored[f"{layer}.lora_B.weight"].float()
            weight = model.get_parameter(f"{layer.removeprefix(ADAPTER_PREFIX)}.weight")
            weight.copy_(weight.float() + described["lora_alpha"] / described["r"] * (b @ a))
    model.save_pretrained(folder)
    for name in companions_of(checkpoint):
        shutil.copyfile(checkpoint / name, folder / name)


def _check_settings(policy: Manifest, inputs: Inputs, lora: LoraConfig | None) -> None:
    stored = json.loads((inputs.folder("policy", ADAPTER) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    rank, alpha, modules = stored["r"], stored["lora_alpha"], sorted(stored["target_modules"])
    has = f"{policy.ref} is an adapter with rank {rank}, alpha {alpha} on {', '.join(modules)}"
    if lora is None:
        raise ConfigError(
            f"{has}, and without lora all weights would be trained",
            hint=f"set lora.rank={rank} lora.alpha={alpha}, or export it with `rollmill policy export`, which merges "
            "it with its base, and import that",
        )
    wanted = None if lora.target_modules is None else sorted(lora.target_modules)
    if (lora.rank, lora.alpha) != (rank, alpha) or wanted not in (None, modules):
        raise ConfigError(
            f"{has}: it cannot be trained on with lora.rank={lora.rank}, lora.alpha={lora.alpha}"
            + (f", lora.target_modules={','.join(wanted)}" if wanted else ""),
            hint="give lora as it is, or begin with its base",
        )
