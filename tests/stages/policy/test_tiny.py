from pathlib import Path

import pytest

from schemas.config import validated
from schemas.errors import ConfigError
from stages.artifacts.commit import Request, materialise
from stages.artifacts.store import Store
from stages.policy.tiny import STAGE, InitConfig, tiny_tokenizer
from tests.stages.policy.conftest import TINY
from tests.stages.policy.stored import contents_of, tiny_policy


def test_the_same_seed_makes_the_same_policy_and_another_seed_another(store: Store, memory_store: Store) -> None:
    first, other = tiny_policy(store, seed=1), tiny_policy(store, seed=2)
    drawn = materialise(store, Request(STAGE, TINY, STAGE.Execution(), {}, 1, draw=1)).manifest
    assert len({contents_of(policy)["checkpoint/model.safetensors"] for policy in (first, other, drawn)}) == 3
    assert contents_of(tiny_policy(memory_store, seed=1)) == contents_of(first)


def test_making_it_does_not_touch_torchs_own_random_numbers(store: Store) -> None:
    import torch

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tiny_policy(store)
    assert torch.rand(1) == expected


def test_no_text_is_unknown_to_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny_tokenizer(64).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "7 × 6 = 42 😀\n\t\x00 <tag>  é"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert len(tokenizer) == 262


def test_a_chat_is_rendered_with_one_token_a_role_and_an_end_that_stops_the_answer() -> None:
    tokenizer = tiny_tokenizer(64)
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, add_generation_prompt=True)
    pieces = ["<|user|>", "1", "+", "1", "<|end|>", "<|assistant|>", "2", "<|end|>", "<|assistant|>"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.eos_token == "<|end|>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == "<|user|>1+1<|end|>"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 96, "head_dim": 64}, "no multiple of head_dim"),
        ({"hidden_size": 128, "n_kv_heads": 3}, "cannot share 3"),
        ({"head_dim": 8}, "greater than or equal to 32"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(InitConfig, sizes, "policy.new")
