"""Adam's state by parameter name, whole and in float32, whatever DeepSpeed has partitioned.

So the number of processes and the ZeRO stage may change from one update to the next. All processes
must call these functions together.
"""

from pathlib import Path
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER, STEP = "master", "step"


def begin(engine: Any, step: int = 0) -> None:
    """Gives the optimizer empty moments and this step count."""
    base = engine.basic_optimizer
    for flat in _flat_parameters(engine):
        base.state[flat] = {
            "step": torch.tensor(float(step)),
            **{moment: torch.zeros_like(flat, memory_format=torch.preserve_format) for moment in MOMENTS},
        }
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def step_count(engine: Any) -> int:
    """Optimizer steps that the state has seen."""
    return int(engine.basic_optimizer.state[_flat_parameters(engine)[0]]["step"].item())


def restore(engine: Any, file: Path) -> None:
    """Takes up the state in ``file``.

    Raises:
        ValueError: it is the state of other parameters.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored:
        begin(engine, int(stored.get_tensor(STEP).item()))
        present = set(stored.keys())
        for name, parameter in _trained(engine):
            missing = [moment for moment in MOMENTS if f"{moment}/{name}" not in present]
            if missing:
                raise ValueError(f"{file} holds no {missing[0]} of the parameter {name}")
            for moment in MOMENTS:
                value = stored.get_tensor(f"{moment}/{name}").to(engine.device)
                if engine.zero_optimization_stage() == 0:
                    engine.basic_optimizer.state[parameter][moment].copy_(value)
                else:
                    safe_set_full_optimizer_state(parameter, value, moment)
            if f"{MASTER}/{name}" in present and engine.bfloat16_enabled():
                safe_set_full_fp32_param(parameter, stored.get_tensor(f"{MASTER}/{name}").to(engine.device))


def take_up_master(model: torch.nn.Module, file: Path) -> None:
    """Gives a float32 model the master weights of a policy that was trained in less, where the file has them."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stored, torch.no_grad():
        present = set(stored.keys())
        for name, parameter in model.named_parameters():
            if f"{MASTER}/{name}" in present:
                parameter.copy_(stored.get_tensor(f"{MASTER}/{name}"))


def collect(engine: Any) -> dict[str, torch.Tensor]:
    """The state as tensors: both moments and, where the model is not float32, the master weights of each parameter."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    state = {STEP: torch.tensor(step_count(engine), dtype=torch.int64)}
    for name, parameter in _trained(engine):
        for moment in MOMENTS:
            if engine.zero_optimization_stage() == 0:
                value = engine.basic_optimizer.state[parameter][moment]
            else:
                value = safe_get_full_optimizer_state(parameter, moment)
            state[f"{moment}/{name}"] = value.detach().cpu()
        if engine.bfloat16_enabled():
            state[f"{MASTER}/{name}"] = safe_get_full_fp32_param(parameter).detach().cpu()
    return state


def _trained(engine: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, one) for name, one in engine.module.named_parameters() if one.requires_grad]


def _flat_parameters(engine: Any) -> list[torch.Tensor]:
    """What the optimizer steps on: the parameters, or this process's flat partitions of them."""
    if engine.zero_optimization_stage() == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]
