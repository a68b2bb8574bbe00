"""The probe: a few fixed sequences with the trainer's logprobs, by which an engine proves that it has these weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.tables import PROBE
from stages.policy.quiet import quiet_libraries

QUESTIONS = ("What is 12 + 7?", "Name three colours, then stop.")
RANDOM_LENGTHS = (16, 31)


def probe_ids(tokenizer: Any, vocabulary: int, longest: int) -> list[list[int]]:
    """The sequences for a policy: two rendered chats, and two of arbitrary ids, which touch more of the embedding.

    Args:
        vocabulary: number of ids that the model knows.
        longest: most tokens that the model takes.
    """
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    random = np.random.Generator(np.random.Philox(key=0))
    arbitrary = [random.integers(vocabulary, size=length).tolist() for length in RANDOM_LENGTHS]
    return [list(ids)[: min(longest, 64)] for ids in [*chats, *arbitrary]]


def probe_table(ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> pa.Table:
    """Probe sequences as the table ``probe``."""
    rows = [
        {"probe_id": number, "ids": list(one), "logprobs": list(its)}
        for number, (one, its) in enumerate(zip(ids, logprobs, strict=True))
    ]
    return pa.Table.from_pylist(rows, schema=PROBE.schema)


def probe_of_folder(folder: Path) -> pa.Table:
    """The probe of a checkpoint folder, computed here with transformers' own attention, one sequence at a time."""
    quiet_libraries()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    text = model.config.get_text_config()
    ids = probe_ids(
        AutoTokenizer.from_pretrained(folder, local_files_only=True),
        text.vocab_size,
        getattr(text, "max_position_embeddings", 64),
    )
    logprobs = []
    with torch.no_grad():
        for one in ids:
            logits = model(input_ids=torch.tensor([one]), use_cache=False).logits[0, :-1].float()
            logprobs.append(
                (-torch.nn.functional.cross_entropy(logits, torch.tensor(one[1:]), reduction="none")).tolist()
            )
    return probe_table(ids, logprobs)
