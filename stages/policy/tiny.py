"""Builds a tiny policy from nothing: a Llama architecture with random weights, a tokenizer of bytes, a chat template.

The tokenizer knows every byte, so no text is unknown to it.
"""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from schemas.artifacts import ShardPlan
from schemas.canonical import seed_from
from schemas.config import ConfigModel
from stages.artifacts.stage import Inputs, InputSpec, ShardOutput, Stage, Work
from stages.policy.checkpoint import CHECKPOINT, outputs
from stages.policy.quiet import quiet_libraries

PAD, END, ROLES = "<|pad|>", "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] or [] -%}{{- part['text'] -}}{%- endfor -%}{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


class InitConfig(ConfigModel):
    """Sizes of the model."""

    hidden_size: int = Field(default=128, ge=32, multiple_of=32)
    n_layers: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=32)
    """At least 32: vLLM's attention takes no smaller one."""
    n_kv_heads: int | None = Field(default=None, ge=1)
    """Heads of keys and values. None: as many as of queries."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """None: four times the hidden size."""
    max_length: int = Field(default=512, ge=16)
    """Most tokens of prompt and answer together."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "InitConfig":
        if self.hidden_size % self.head_dim:
            raise ValueError(f"hidden_size {self.hidden_size} is no multiple of head_dim {self.head_dim}")
        if self.n_kv_heads is not None and (self.hidden_size // self.head_dim) % self.n_kv_heads:
            raise ValueError(
                f"{self.hidden_size // self.head_dim} heads cannot share {self.n_kv_heads} of keys and values"
            )
        return self


class InitExecution(ConfigModel):
    """Nothing to set."""


class InitStage(Stage[InitConfig, InitExecution]):
    """A tiny policy with random weights."""

    name = "policy_init"
    kind = "policy"
    version = 1
    stochastic = True
    inputs: ClassVar[dict[str, InputSpec]] = {}
    tables = ("probe",)
    Config = InitConfig
    Execution = InitExecution

    def plan(self, inputs: Inputs, config: InitConfig, execution: InitExecution, work: Work) -> list[dict[str, Any]]:
        return [{}]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: InitConfig, execution: InitExecution, work: Work
    ) -> ShardOutput:
        from stages.policy.probe import probe_of_folder

        folder = work.scratch / CHECKPOINT
        n_parameters = write_tiny_policy(folder, config, seed_from(work.seed, work.draw))
        return ShardOutput(
            tables={"probe": probe_of_folder(folder)},
            files=outputs(folder, CHECKPOINT),
            summary={"parameters": n_parameters},
        )


STAGE = InitStage()


def write_tiny_policy(folder: Path, config: InitConfig, seed: int) -> int:
    """Writes the checkpoint folder; returns the number of parameters."""
    quiet_libraries()
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(config.max_length)
    n_heads = config.hidden_size // config.head_dim
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    settings = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size or 4 * config.hidden_size,
        num_hidden_layers=config.n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=config.n_kv_heads or n_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=True,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(settings)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def tiny_tokenizer(max_length: int) -> Any:
    """A tokenizer with one token for each byte and one for each role of a chat."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [PAD, END, *ROLES]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(names + letters)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=list(ROLES),
        model_max_length=max_length,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
