"""The rollouts stage over vLLM against vLLM's own offline ``LLM.generate`` on the same prompts, seeds and policy.

The stage is measured end to end, from the request to the committed artifact; both sides have started before, and take
turns. The fastest round of each is compared, as whatever else the machine does only ever slows one down.
"""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import polars as pl

from stages.artifacts.store import open_store
from stages.rollouts.engines import close_engines
from stages.rollouts.workers.command import vllm_python
from stages.rollouts.workers.settings import VllmExecution
from tests.stages.rollouts.policies import make_policy
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks

N_TASKS, N = 64, 8
STOP = 2
"""The id that ends an answer of these policies."""
KV_CACHE_GIB = "2"
OFFLINE = Path(__file__).with_name("offline_vllm.py")
SMALL_MODEL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "initializer_range": 0.04,
}  # fmt: skip
"""Shape of SmolLM2-135M, but for its vocabulary."""


def measure() -> list[dict[str, Any]]:
    ours, theirs = _rates(SMALL_MODEL, max_tokens=16, rounds=2)
    tiny_ours, tiny_theirs = _rates({}, max_tokens=128, rounds=6)
    ratio, tiny = ours / theirs, tiny_ours / tiny_theirs
    return [
        {
            "name": "rollouts / LLM.generate, 106M parameters",
            "measured": f"{ratio:.2f} ({ours:,.0f} and {theirs:,.0f} tokens/s, {N_TASKS * N} sequences)",
            "budget": ">= 0.90",
            "ok": ratio >= 0.9,
        },
        {
            "name": "rollouts / LLM.generate, 0.1M parameters",
            "measured": f"{tiny:.2f} ({tiny_ours:,.0f} and {tiny_theirs:,.0f} tokens/s)",
            "budget": "none: both cores are busy with what is not the model",
            "ok": True,
        },
    ]


def _rates(shape: dict[str, Any], max_tokens: int, rounds: int) -> tuple[float, float]:
    """Tokens a second in the fastest round of the stage, and of ``LLM.generate``."""
    ours, theirs = [], []
    python = vllm_python(VllmExecution())
    with tempfile.TemporaryDirectory() as folder:
        made = make_policy(Path(folder) / "policy", **shape)
        store = open_store(Path(folder) / "store")
        policy, tasks = stored_policy(store, made), stored_tasks(store, N_TASKS)
        config = {"n": N, "engine": {"type": "vllm", "dtype": "float32"}, "sampling": {"max_tokens": max_tokens}}
        vllm = {"python": python, "log_dir": f"{folder}/logs", "env": {"VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB}}
        execution = {"shard_tasks": N_TASKS, "max_concurrency": N_TASKS * N, "vllm": vllm}
        try:
            with Offline(python, made.folder, Path(folder) / "offline.log") as offline:
                for draw in range(rounds + 1):
                    began = time.perf_counter()
                    manifest = rolled_out(store, request(tasks, policy, config, execution, draw=draw)).manifest
                    seconds = time.perf_counter() - began
                    steps = frame(store, manifest, "steps")
                    answered = offline.generate(steps, max_tokens)
                    same = sum(map(list.__eq__, answered["ids"], steps["response_ids"].to_list()))
                    if same < 0.99 * len(steps):
                        raise AssertionError(f"only {same} of {len(steps)} answers are the same on both sides")
                    if draw:  # the first round starts our worker
                        ours.append(manifest.summary["response_tokens"] / seconds)
                        theirs.append(sum(map(len, answered["ids"])) / answered["seconds"])
        finally:
            close_engines()
    return max(ours), max(theirs)


class Offline:
    """vLLM's ``LLM`` in a process of its own."""

    def __init__(self, python: str, policy: Path, log_file: Path):
        arguments = {
            "dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False, "logprobs_mode": "raw_logprobs",
        }  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB}
        self._log_file = log_file
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(OFFLINE), str(policy), json.dumps(arguments)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            )  # fmt: skip

    def __enter__(self) -> "Offline":
        self._next()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate(timeout=60)

    def generate(self, steps: pl.DataFrame, max_tokens: int) -> dict[str, Any]:
        """Samples an answer to the prompt of each step with its seed: ``ids``, and the ``seconds`` that it took."""
        sampling = {
            "temperature": 1.0, "max_tokens": max_tokens, "stop_token_ids": [STOP], "ignore_eos": True, "logprobs": 0,
            "detokenize": False,
        }  # fmt: skip
        seeds = [seed & (2**63 - 1) for seed in steps["seed"]]
        asked = {"prompts": steps["prompt_ids"].to_list(), "seeds": seeds, "sampling": sampling}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._next()

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # vLLM writes there, too
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"vLLM has ended: {self._log_file.read_text()[-3000:]}")
