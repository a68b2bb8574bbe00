"""What ``rollmill doctor`` finds: libraries, engines, the store. Looks, and writes only the store's own test."""

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from schemas.errors import RollmillError

_NEEDED = ("prefect", "pyarrow", "polars", "fsspec", "torch", "transformers", "deepspeed", "math-verify", "pebble")
_OPTIONAL = {
    "s3fs": "s3:// stores (extra s3)",
    "gguf": "GGUF files (extra gguf)",
    "prefect-ray": "rollouts in a Ray cluster (extra ray)",
    "prefect-dask": "rollouts in a Dask cluster (extra dask)",
}
_VLLM_VERSION = """
from importlib.metadata import packages_distributions, version
print(version(packages_distributions()["vllm"][0]))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    state: Literal["ok", "off", "bad"]
    """``off``: not there, and not needed."""
    what: str
    found: str


def findings(store: str) -> list[Finding]:
    """Everything that was looked at, in the order in which a person reads it."""
    return [_python(), *_libraries(), *_engines(), _compiler(), _store(store)]


def _python() -> Finding:
    version = ".".join(str(number) for number in sys.version_info[:3])
    return Finding("ok" if sys.version_info >= (3, 11) else "bad", "python", version)


def _libraries() -> list[Finding]:
    found = []
    for name in _NEEDED:
        version = _version(name)
        found.append(Finding("ok" if version else "bad", name, version or "missing: pip install rollmill"))
    for name, purpose in _OPTIONAL.items():
        version = _version(name)
        found.append(Finding("ok" if version else "off", name, version or f"not installed; for {purpose}"))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _engines() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [Finding("bad", "engine transformers", "torch is missing")]
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    where = ", ".join(gpus) if gpus else f"CPU, {torch.get_num_threads()} threads"
    return [Finding("ok", "engine transformers", f"can start ({where})"), _vllm()]


def _vllm() -> Finding:
    from stages.rollouts.workers.command import vllm_python
    from stages.rollouts.workers.settings import VllmExecution

    try:
        python = vllm_python(VllmExecution())
    except RollmillError as error:
        return Finding("off", "engine vllm", str(error).replace("\n", ": "))
    asked = subprocess.run([python, "-c", _VLLM_VERSION], capture_output=True, text=True, timeout=60, check=False)
    if asked.returncode:
        return Finding("bad", "engine vllm", f"{python} has no vllm; make one that does with `make vllm`")
    return Finding("ok", "engine vllm", f"{asked.stdout.strip()}, can start its workers ({python})")


def _compiler() -> Finding:
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        return Finding("off", "compiler", "none; needed only by DeepSpeed's own shared-memory collectives on the CPU")
    return Finding("ok", "compiler", compiler)


def _store(url: str) -> Finding:
    from stages.artifacts.store import open_store

    try:
        shelf = open_store(url)
    except RollmillError as error:
        return Finding("bad", f"store {url}", str(error))
    n_runs = len(shelf.runs())
    return Finding("ok", f"store {url}", f"can be written, creates each object once; {n_runs} runs")
