"""What can be told from a checkpoint's small files, without loading the model."""

import json
from pathlib import Path
from typing import Any

from schemas.errors import InputError


def model_config(folder: Path) -> dict[str, Any]:
    """The model's ``config.json``.

    Raises:
        InputError: it is missing or not JSON.
    """
    path = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        raise InputError(f"the policy has no {path.name}, so it is not a Hugging Face checkpoint") from None
    except ValueError as error:
        raise InputError(f"the policy's {path.name} is not JSON: {error}") from None


def context_length_of(folder: Path) -> int:
    """Tokens of prompt and answer together at most."""
    config = model_config(folder)
    config = {**config, **config.get("text_config", {})}
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        if isinstance(config.get(name), int):
            length: int = config[name]
            return length
    raise InputError("the policy's config.json does not tell its context length (max_position_embeddings)")


def end_token_ids(folder: Path) -> set[int]:
    """The ids that end an answer, as the model's own files say."""
    found: set[int] = set()
    files = [folder / "config.json", folder / "generation_config.json"]
    for config in (json.loads(path.read_text(encoding="utf-8")) for path in files if path.exists()):
        ids = config.get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or [])
    return found
