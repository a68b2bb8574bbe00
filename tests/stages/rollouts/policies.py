"""Tiny policies with real tokenizers and chat templates, and a reference forward pass for each."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stages.rollouts.engines.base import PolicyFiles, Probe

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["what is 12 + 7 and 3 * 4? the answer is 19, then 12.", "user assistant system\n", "abc 0123456789 #### -5"]
Forward = Callable[[Path, np.ndarray], np.ndarray]


def make_tokenizer(folder: Path, chat_template: str | None = CHATML, bos: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 300 ids, saved in ``folder``."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=bos
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(folder: Path, seed: int, **settings: object) -> None:
    """A random Llama with heads of dimension 32, saved in ``folder``."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 304,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    LlamaForCausalLM(LlamaConfig(**(shape | settings))).save_pretrained(folder)  # type: ignore[arg-type]


def forward_logprobs(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logprobs of ``ids[1:]`` by transformers' own attention, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0, :-1]
    found = logits.double().log_softmax(-1).gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])
    return found[:, 0].float().numpy()


def make_policy(folder: Path, seed: int = 0, **settings: object) -> PolicyFiles:
    """A tiny policy with a probe of two sequences."""
    make_tokenizer(folder)
    make_model(folder, seed, **settings)
    return _with_probe(folder, seed)


def make_endless_policy(folder: Path, seed: int = 0, context: int = 8192) -> PolicyFiles:
    """One that does not end its answers: one dimension is the same throughout, and makes the ends unlikely."""
    make_tokenizer(folder)
    make_model(folder, seed, max_position_embeddings=context)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = 1.0
        embeddings[[0, 2], 0] = -30.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    model.save_pretrained(folder)
    return _with_probe(folder, seed)


def _with_probe(folder: Path, seed: int) -> PolicyFiles:
    random = np.random.default_rng(7)
    ids = [random.integers(3, 300, size=size).astype(np.int32) for size in (20, 11)]
    probe = Probe(ids=ids, logprobs=[forward_logprobs(folder, sequence) for sequence in ids])
    return PolicyFiles(policy_id=f"{seed:064x}", folder=folder, probe=probe)


def make_adapter(base: PolicyFiles, folder: Path, seed: int, rank: int = 4) -> PolicyFiles:
    """A random adapter of all linear layers, made by PEFT, with the probe that PEFT's model computes."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base.folder), settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    model.peft_config["default"].base_model_name_or_path = None
    model.save_pretrained(str(folder))
    logprobs = []
    for ids in base.probe.ids:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0, :-1]
        found = logits.double().log_softmax(-1).gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])
        logprobs.append(found[:, 0].float().numpy())
    return PolicyFiles(f"{1000 + seed:064x}", base.folder, Probe(base.probe.ids, logprobs), folder, f"{seed:064x}")
