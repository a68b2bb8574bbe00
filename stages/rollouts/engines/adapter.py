"""A LoRA adapter on a transformers model: what it adds to a layer's output is added by a hook, the weights stay as
they are. So another adapter, or none, is a matter of milliseconds."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from schemas.errors import InputError

_PREFIX = "base_model.model."
_PLAIN = {"bias": ("none",), "use_dora": (False,), "use_rslora": (False,), "modules_to_save": (None, [])}
"""Settings of PEFT with the values that this way of applying an adapter is right for."""


class Adapter:
    """An adapter that is on a model, until it is taken off."""

    def __init__(self, model: Any, folder: Path):
        from safetensors.torch import load_file

        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        for name, plain in _PLAIN.items():
            if settings.get(name, plain[0]) not in plain:
                raise InputError(f"the transformers engine cannot serve an adapter with {name}={settings[name]!r}")
        scale = settings["lora_alpha"] / settings["r"]
        stored = load_file(folder / "adapter_model.safetensors")
        layers = dict(model.named_modules())
        pairs: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in stored.items():
            layer, _, side = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            if side not in ("lora_A", "lora_B") or not isinstance(layers.get(layer), torch.nn.Linear):
                raise InputError(f"the adapter in {folder} does not fit its base: {name} is of no linear layer")
            pairs.setdefault(layer, {})[side] = tensor.to(model.device, model.dtype)
        self._hooks = [
            layers[layer].register_forward_hook(_adding(pair["lora_A"], pair["lora_B"], scale))
            for layer, pair in pairs.items()
        ]

    def remove(self) -> None:
        """Takes it off the model."""
        for hook in self._hooks:
            hook.remove()


def _adding(a: torch.Tensor, b: torch.Tensor, scale: float) -> Any:
    def hook(layer: torch.nn.Module, given: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return out + linear(linear(given[0], a), b) * scale

    return hook
