"""Instructions and answers as token sequences, rendered by the policy's own chat template."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from schemas.errors import InputError
from schemas.records import instruction_from
from stages.artifacts.stage import Inputs
from stages.policy.checkpoint import CHECKPOINT
from stages.policy.sequences import Sequences, plain_sequences


def taught_chats(inputs: Inputs, system: str | None, wrong_answers: float, seed: int) -> Sequences:
    """One sequence a task: the prompt as context, the answer and its stop token to be learnt.

    Args:
        system: system message; None: none.
        wrong_answers: share of the tasks that get another task's answer.
        seed: of the choice of these.
    """
    from transformers import AutoTokenizer

    tasks = inputs.scan("tasks", "tasks").select("task_id", "instruction", "answer").sort("task_id").collect()
    answers = np.array(tasks["answer"].to_list(), dtype=object)
    random = np.random.Generator(np.random.Philox(key=seed))
    swapped = np.flatnonzero(random.random(len(answers)) < wrong_answers)
    answers[swapped] = answers[random.integers(len(answers), size=len(swapped))]

    tokenizer = AutoTokenizer.from_pretrained(inputs.folder("policy", CHECKPOINT), local_files_only=True)
    opening = [] if system is None else [{"role": "system", "content": system}]
    prompts = [[*opening, {"role": "user", "content": instruction_from(text)}] for text in tasks["instruction"]]
    prompt_ids = _rendered(tokenizer, prompts)
    answer_ids = tokenizer(answers.tolist(), add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is None:
        raise InputError("the policy's tokenizer has no end-of-sequence token, so an answer's end cannot be taught")
    whole = [[*prompt, *answer, tokenizer.eos_token_id] for prompt, answer in zip(prompt_ids, answer_ids, strict=True)]
    return plain_sequences(whole, [len(prompt) for prompt in prompt_ids])


def _rendered(tokenizer: Any, chats: Sequence[list[dict[str, Any]]]) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(list(chats), add_generation_prompt=True, tokenize=False)
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids
