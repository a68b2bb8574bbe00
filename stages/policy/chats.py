"""Instructions and answers as token sequences, rendered by the policy's own chat template."""

from collections.abc import Sequence
from typing import Any

from schemas.errors import InputError
from schemas.records import instruction_from
from stages.artifacts.stage import Inputs
from stages.policy.checkpoint import CHECKPOINT
from stages.policy.quiet import quiet_libraries
from stages.policy.sequences import Sequences, plain_sequences


def taught_chats(inputs: Inputs, system: str | None, answer_forms: Sequence[str]) -> Sequences:
    """One sequence for each task and form: the prompt as context, the answer and its stop token to be learnt.

    Args:
        system: system message; None: none.
        answer_forms: texts with ``{answer}`` in them.
    """
    quiet_libraries()
    from transformers import AutoTokenizer

    tasks = inputs.scan("tasks", "tasks").select("task_id", "instruction", "answer").sort("task_id").collect()
    tokenizer = AutoTokenizer.from_pretrained(inputs.folder("policy", CHECKPOINT), local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise InputError("the policy's tokenizer has no end-of-sequence token, so an answer's end cannot be taught")
    opening: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    prompts = [[*opening, {"role": "user", "content": instruction_from(text)}] for text in tasks["instruction"]]
    answers = [form.replace("{answer}", answer) for answer in tasks["answer"] for form in answer_forms]
    prompt_ids = [ids for ids in _rendered(tokenizer, prompts) for _ in answer_forms]
    answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
    whole = [[*prompt, *answer, tokenizer.eos_token_id] for prompt, answer in zip(prompt_ids, answer_ids, strict=True)]
    return plain_sequences(whole, [len(prompt) for prompt in prompt_ids])


def _rendered(tokenizer: Any, chats: Sequence[list[dict[str, Any]]]) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(list(chats), add_generation_prompt=True, tokenize=False)
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids
