"""LoRA adapters on a model, by PEFT: put there, taken up, written; in files as PEFT and vLLM read them.

Of the model only the adapter is trained. What is known here of PEFT's names and files stays here.
"""

import json
from pathlib import Path
from typing import Any

import torch

from schemas.canonical import canonical_json
from schemas.errors import InputError
from stages.policy.checkpoint import ADAPTER_CONFIG, ADAPTER_FILE, ADAPTER_PREFIX
from stages.policy.settings import LoraConfig

_NAME = "default"


def begin_adapter(model: Any, settings: LoraConfig) -> None:
    """Puts a new adapter on the model, which changes nothing yet: its B is zero; A is the same whenever asked for.

    Raises:
        InputError: the model has no layer of such a name.
    """
    known = _linear_names(model)
    wanted = known if settings.target_modules is None else sorted(settings.target_modules)
    unknown = sorted(set(wanted) - set(known))
    if unknown or not known:
        raise InputError(
            f"lora.target_modules: the policy has no linear layer {', '.join(unknown) or 'at all'} in its decoder",
            hint=f"it has: {', '.join(known)}",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _inject(model, settings.rank, settings.alpha, wanted)


def take_up_adapter(model: Any, folder: Path) -> None:
    """Puts a stored adapter on the model.

    Raises:
        InputError: it belongs to another model.
    """
    from safetensors.torch import load_file

    described = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    _inject(model, described["r"], described["lora_alpha"], described["target_modules"])
    stored, own = load_file(folder / ADAPTER_FILE), adapter_parameters(model)
    if {name: tensor.shape for name, tensor in stored.items()} != {name: one.shape for name, one in own.items()}:
        raise InputError(f"the adapter in {folder} does not fit its base: other layers or sizes")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])


def adapter_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """What is trained, by its name in the adapter's file."""
    return {stored_name(name): one for name, one in model.named_parameters() if one.requires_grad}


def stored_name(name: str) -> str:
    """Name in the adapter's file of a parameter of the model."""
    return ADAPTER_PREFIX + name.replace(f".{_NAME}.", ".")


def write_adapter(model: Any, weights: dict[str, torch.Tensor], base: str, folder: Path) -> None:
    """Writes the adapter.

    Args:
        weights: of the parameters that are trained, by their name in the model.
        base: reference of the base.
    """
    from safetensors.torch import save_file

    settings = model.peft_config[_NAME]
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.r,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(settings.target_modules),
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True)
    (folder / ADAPTER_CONFIG).write_text(canonical_json(described), encoding="utf-8")
    save_file(
        {stored_name(name): tensor.contiguous() for name, tensor in weights.items()},
        folder / ADAPTER_FILE,
        metadata={"format": "pt"},
    )


def _inject(model: Any, rank: int, alpha: int, modules: list[str]) -> None:
    import peft

    settings = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, lora_dropout=0.0, bias="none")
    peft.inject_adapter_in_model(settings, model, _NAME)


def _linear_names(model: Any) -> list[str]:
    """Last parts of the names of the decoder's linear layers."""
    layers = model.get_decoder().named_modules()
    return sorted({name.rpartition(".")[2] for name, layer in layers if isinstance(layer, torch.nn.Linear)})
