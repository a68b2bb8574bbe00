"""Policies that call tools, and conversations as they are stored, for tests of what speaks to the policy over HTTP."""

from pathlib import Path
from typing import Any

import polars as pl

from stages.rollouts.chat_template import chat_template_in
from stages.rollouts.engines.base import PolicyFiles
from tests.stages.rollouts.policies import make_policy

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\nuse <tool_call></tool_call> {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<think>hm</think>\n\nlet me see <tool_call>{"arguments":{"a":  2,"b":3},"name": "add"}</tool_call>'


def make_tool_policy(folder: Path, context: int = 1024) -> PolicyFiles:
    """A tiny policy whose chat template knows tools in the form of Hermes and Qwen."""
    made = make_policy(folder, max_position_embeddings=context)
    (made.folder / "chat_template.jinja").write_text(WITH_TOOLS)
    return made


def scripted(policy: PolicyFiles, *texts: str) -> dict[str, Any]:
    """An engine that answers with one of these texts."""
    template = chat_template_in(policy.folder)
    replies = [[*template.encode(text).tolist(), template.stop_token_ids[-1]] for text in texts]
    return {"type": "scripted", "replies": replies}


def whole_sequences(steps: pl.DataFrame) -> list[tuple[list[int], list[int]]]:
    """Prompt and sampled ids of each step of one trajectory, the prompt whole."""
    found: list[tuple[list[int], list[int]]] = []
    so_far: list[int] = []
    for row in steps.sort("step_index").iter_rows(named=True):
        prompt = [*so_far[: row["prefix_length"]], *row["prompt_ids"]]
        found.append((prompt, row["response_ids"]))
        so_far = [*prompt, *row["response_ids"]]
    return found
