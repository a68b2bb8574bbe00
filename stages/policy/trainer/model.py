"""Loads a checkpoint folder as a model that reads packed rows, and writes one.

Refuses models whose attention cannot be packed exactly: a quick comparison with the model's own
attention, sequence by sequence, is made at every load.
"""

from pathlib import Path
from typing import Any

import torch

from schemas.errors import InputError
from stages.policy.sequences import plain_sequences
from stages.policy.trainer import attention
from stages.policy.trainer.adapter import take_up_adapter
from stages.policy.trainer.forward import logprobs_of, row_of, sampled_logits

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}


def load_model(folder: Path, dtype: torch.dtype, *, trained: bool, adapter: Path | None = None) -> Any:
    """The model, in evaluation mode unless it is trained; dropout is off in both.

    Args:
        adapter: folder of an adapter to put on it; None: none.
    Raises:
        InputError: transformers cannot load it, or its attention cannot be packed.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except Exception as error:  # whatever transformers raises for a model that it cannot load
        raise InputError(f"the policy in {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.eval()
    _use_packed_attention(model, folder)
    if adapter is not None:
        take_up_adapter(model, adapter)
    model.train(trained)
    return model


def _use_packed_attention(model: Any, folder: Path) -> None:
    """Switches to packed attention and compares both on sequences of unlike length."""
    top = min(model.config.get_text_config().vocab_size, 1000)
    ids = [[(7 * i + j * j) % top for j in range(length)] for i, length in enumerate((5, 9, 3))]
    row = row_of(plain_sequences(ids, [1] * len(ids)), torch.device("cpu"))
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([one]), use_cache=False).logits[0, :-1].float() for one in ids])
        try:
            model.set_attn_implementation(attention.NAME)
            packed = sampled_logits(model, row)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise _cannot_pack(model, folder, str(error)) from error
    apart = (logprobs_of(packed, row) - logprobs_of(alone, row)).abs().max().item()
    if not apart <= TOLERANCE[model.dtype]:
        raise _cannot_pack(model, folder, f"logprobs differ by up to {apart:.3g}")


def _cannot_pack(model: Any, folder: Path, why: str) -> InputError:
    return InputError(
        f"the policy in {folder} ({type(model).__name__}) cannot be trained on packed sequences: {why}",
        hint="models of the Llama, Qwen, Mistral and SmolLM families can",
    )


def save_model(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes config and weights; tied weights stay tied.

    Args:
        weights: every parameter by its name in the model, whole and on the CPU.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {
        name: weights[name_of[id(tensor)]] if id(tensor) in name_of else tensor.detach().cpu()
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    model.save_pretrained(folder, state_dict=state, max_shard_size="1000TB")


def whole_parameters(model: Any, *, partitioned: bool) -> dict[str, torch.Tensor]:
    """Every parameter that is trained, whole and on the CPU; all processes must call it together."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not partitioned:
        return {name: parameter.detach().cpu() for name, parameter in trained}
    import deepspeed

    whole = {}
    for name, parameter in trained:
        with deepspeed.zero.GatheredParameters([parameter]):
            whole[name] = parameter.detach().cpu().clone()
    return whole
