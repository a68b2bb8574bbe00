"""Turns a model from outside into a policy: a folder here or on S3, a GGUF file, or a pinned revision on the hub.

Where the model lies is execution; its content is in the key. What comes in is safetensors and never
pickle, brings no code, and has a tokenizer and a chat template.
"""

import re
import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from schemas.artifacts import ShardPlan
from schemas.canonical import canonical_hash
from schemas.config import ConfigModel
from schemas.errors import ConfigError, InputError, NotFoundError
from stages.artifacts.stage import Inputs, InputSpec, ShardOutput, Stage, Work
from stages.policy.checkpoint import (
    CHECKPOINT,
    TEMPLATE_FILE,
    check_folder,
    companions_of,
    outputs,
    sha256_of,
    weight_files,
)
from stages.policy.fetching import fetched_folder, is_remote
from stages.policy.quiet import quiet_libraries
from stages.policy.settings import Dtype

_HUB = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>\w+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class ImportConfig(ConfigModel):
    """What is imported, and as what."""

    digest: str | None = None
    """Hash of the source's content. None: filled in when the settings are resolved."""
    dtype: Dtype | None = None
    """Number format of the stored weights. None: the source's own; float32 for GGUF."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the source's chat template; its text when resolved. None: the source's."""


class ImportExecution(ConfigModel):
    """Where the model lies."""

    location: str | None = Field(default=None, min_length=1)
    """A folder here or on other storage (``s3://bucket/folder``), a ``.gguf`` file, or ``hf://org/name@revision`` with
    the revision's full commit hash."""


class ImportStage(Stage[ImportConfig, ImportExecution]):
    """A policy from outside."""

    name = "policy_import"
    kind = "policy"
    version = 1
    stochastic = False
    inputs: ClassVar[dict[str, InputSpec]] = {}
    tables = ("probe",)
    Config = ImportConfig
    Execution = ImportExecution

    def resolve(self, config: ImportConfig, execution: ImportExecution) -> ImportConfig:
        """Fills in the digest and reads the chat template; refuses a source that is no policy."""
        location = _location(execution)
        template = _template_text(config.chat_template)
        kind = _kind_of(location)
        if kind == "hub":
            digest = canonical_hash(["hub", *_hub_name(location)])
        elif kind == "gguf":
            digest = sha256_of(Path(location))
        else:
            folder = _folder_at(location)
            check_folder(folder, template_is_given=template is not None)
            digest = canonical_hash([[file.name, sha256_of(file)] for file in _files_of(folder)])
        return config.model_copy(update={"digest": digest, "chat_template": template})

    def plan(
        self, inputs: Inputs, config: ImportConfig, execution: ImportExecution, work: Work
    ) -> list[dict[str, Any]]:
        return [{}]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: ImportConfig, execution: ImportExecution, work: Work
    ) -> ShardOutput:
        from stages.policy.probe import probe_of_folder

        location, folder = _location(execution), work.scratch / CHECKPOINT
        kind = _kind_of(location)
        quiet_libraries()
        if kind == "gguf":
            _from_gguf(Path(location), folder, config.dtype or "float32")
        else:
            source = _downloaded(location) if kind == "hub" else _folder_at(location)
            check_folder(source, template_is_given=config.chat_template is not None)
            _from_folder(source, folder, config.dtype)
        if config.chat_template is not None:
            (folder / TEMPLATE_FILE).write_text(config.chat_template, encoding="utf-8")
        check_folder(folder)
        work.progress(1, 2)
        try:
            probe = probe_of_folder(folder)
        except Exception as error:  # whatever transformers raises for a model that it cannot load
            raise InputError(f"{location} cannot be used as a policy: {type(error).__name__}: {error}") from error
        n_bytes = sum(file.stat().st_size for file in weight_files(folder))
        return ShardOutput(
            tables={"probe": probe}, files=outputs(folder, CHECKPOINT), summary={"weight_bytes": n_bytes}
        )


STAGE = ImportStage()


def _location(execution: ImportExecution) -> str:
    if execution.location is None:
        raise ConfigError("policy_import: nothing says where the model is", hint="set execution.location")
    return execution.location


def _kind_of(location: str) -> Literal["hub", "gguf", "folder"]:
    if location.startswith("hf://"):
        return "hub"
    if is_remote(location):
        return "folder"
    path = Path(location)
    if not path.exists():
        raise NotFoundError(
            f"there is no model {location}",
            hint="a policy is imported from a folder, a .gguf file, hf://org/name@revision, or s3://bucket/folder",
        )
    if path.is_dir():
        return "folder"
    if path.suffix != ".gguf":
        raise InputError(f"{location} is neither a model folder nor a .gguf file")
    return "gguf"


def _hub_name(location: str) -> tuple[str, str]:
    match = _HUB.fullmatch(location)
    if match is None or not _COMMIT.fullmatch(match["revision"]):
        raise ConfigError(
            f"{location!r} does not pin a revision",
            hint="write hf://org/name@COMMIT with the 40 digits of the commit, so that the same name is the same model",
        )
    return match["name"], match["revision"]


def _template_text(given: str | None) -> str | None:
    """The template in the file ``given``; a text that is a template already stays."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError(f"chat_template: {given} cannot be read: {error}") from None


def _folder_at(location: str) -> Path:
    return fetched_folder(location) if is_remote(location) else Path(location)


def _files_of(folder: Path) -> list[Path]:
    companions = [folder / name for name in companions_of(folder)]
    return [folder / "config.json", *companions, *weight_files(folder)]


def _downloaded(location: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(f"{location} needs the hub's library", hint="pip install 'rollmill[hub]'") from None
    name, revision = _hub_name(location)
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
            )
        )
    except Exception as error:  # the hub's own errors, and those of the network under it
        raise InputError(f"{location} cannot be fetched: {type(error).__name__}: {error}") from error


def _from_folder(source: Path, folder: Path, dtype: Dtype | None) -> None:
    folder.mkdir()
    for file in _files_of(source):
        shutil.copyfile(file, folder / file.name)
    if dtype is None:
        return
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, local_files_only=True, dtype=getattr(torch, dtype))
    for file in weight_files(folder):
        file.unlink()
    model.save_pretrained(folder)


def _from_gguf(source: Path, folder: Path, dtype: Dtype) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise InputError(f"{source} needs the GGUF library", hint="pip install 'rollmill[gguf]'") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, local_files_only=True, dtype=getattr(torch, dtype)
        )
    except Exception as error:  # a truncated file and an unknown architecture raise many kinds
        raise InputError(f"{source} cannot be read as GGUF: {type(error).__name__}: {error}") from error
    # The weights are plain numbers again; transformers would refuse to save them as long as it calls them quantised.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.is_quantized = False  # type: ignore[assignment]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
