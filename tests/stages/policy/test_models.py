"""Other architectures than Llama: packed exactly or refused, and written so that they come back as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import InputError
from stages.policy.trainer.model import load_model, save_model, whole_parameters

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
CAN: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "phi3": {},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
CANNOT: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 0.01, "query_pre_attn_scalar": 16},
    "mamba": {"state_size": 4},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
}


def model_folder(folder: Path, kind: str, settings: dict[str, Any]) -> Path:
    """A checkpoint of this architecture with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | settings)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", CAN)
def test_an_architecture_that_can_be_packed_is_written_as_it_was_read(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = model_folder(tmp_path / "model", kind, CAN[kind])
    model = load_model(folder, torch.float32, trained=True)
    save_model(model, whole_parameters(model, partitioned=False), tmp_path / "again")
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", CANNOT)
def test_an_architecture_that_cannot_be_packed_is_refused(kind: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", kind, CANNOT[kind])
    with pytest.raises(InputError, match="cannot be trained on packed sequences"):
        load_model(folder, torch.float32, trained=True)
