"""Checkpoint folders in the Hugging Face form: what a policy must have, and how their files are told apart."""

import hashlib
import json
from pathlib import Path

from schemas.artifacts import Manifest
from schemas.errors import InputError
from stages.artifacts.adapters import ADAPTER, base_of
from stages.artifacts.stage import FileOutput

CHECKPOINT, OPTIMIZER = "checkpoint", "optimizer"
WEIGHTS_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_PREFIX = "base_model.model."
"""Before the name of a parameter in an adapter's file: so PEFT writes it, and vLLM reads it."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
TEMPLATE_FILE = "chat_template.jinja"
_COMPANIONS = (".json", ".jinja", ".txt", ".model")


def check_folder(folder: Path, *, template_is_given: bool = False) -> None:
    """Refuses a folder that is no policy: without config, weights as safetensors, tokenizer or chat template.

    Raises:
        InputError: with what is missing.
    """
    if not (folder / "config.json").is_file():
        raise InputError(f"the policy directory {folder} has no config.json", hint=_FORM)
    if not list(folder.glob("*.safetensors")):
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        if pickled:
            raise InputError(
                f"the policy directory {folder} holds its weights as pickle ({pickled[0]}), which is never read",
                hint="save it again with save_pretrained, which writes safetensors",
            )
        raise InputError(f"the policy directory {folder} has no weights (*.safetensors)", hint=_FORM)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(f"the policy directory {folder} has no tokenizer ({', '.join(TOKENIZER_FILES)})", hint=_FORM)
    if not template_is_given and not _has_template(folder):
        raise InputError(
            f"the policy directory {folder} has no chat template",
            hint="give one by config.chat_template: the path of a Jinja file, as the model's card describes it",
        )


def companions_of(folder: Path) -> dict[str, bytes]:
    """The files that an update leaves as they are (tokenizer, chat template, generation settings), by name."""
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.iterdir())
        if file.suffix in _COMPANIONS
        and file.name != "config.json"
        and not file.name.endswith(".safetensors.index.json")
    }


def weight_files(folder: Path) -> list[Path]:
    """Weights and their index."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")])


def outputs(folder: Path, part: str) -> list[FileOutput]:
    """Every file of a folder as a file of the part."""
    return [FileOutput(part, file.name, file) for file in sorted(folder.iterdir()) if file.is_file()]


def content_of(policy: Manifest) -> str:
    """Hash of a stored policy's weights and optimizer state."""
    base = base_of(policy)
    files = policy.table_files(CHECKPOINT if base is None else ADAPTER)
    weights = [entry.sha256 for entry in files if entry.name.endswith(".safetensors")]
    optimizer = [entry.sha256 for entry in policy.table_files(OPTIMIZER)]
    return content_hash(([] if base is None else [base.digest]) + weights + optimizer)


def content_hash(digests: list[str]) -> str:
    """Hash of a policy by the hashes of, in order: its base if it is an adapter, weights, the optimizer's if any."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def sha256_of(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


_FORM = "a policy is a Hugging Face model folder: config.json, *.safetensors, a tokenizer and a chat template"


def _has_template(folder: Path) -> bool:
    if (folder / TEMPLATE_FILE).is_file() or (folder / "chat_template.json").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("chat_template"))
