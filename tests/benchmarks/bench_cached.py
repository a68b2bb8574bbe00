"""Work that is done already: how long the command line takes to say so, as whole processes."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

BUDGET_S = 1.0
REPEATS = 4
RECIPE = {
    "iterations": 1,
    "policy": {"new": {"hidden_size": 32, "n_layers": 1, "max_length": 64}},
    "tasks": {"benchmark": "arithmetic", "limit": 8},
    "rollouts": {"n": 2, "sampling": {"max_tokens": 4}},
    "rewards": {"grader": "numeric"},
}
STAGES = {
    "tasks": ["benchmark=arithmetic", "limit=8"],
    "rollouts": ["tasks=cached:tasks", "policy=cached@0:policy_in", "n=2", "sampling.max_tokens=4", "batch.size=8"],
    "rewards": ["rollouts=cached:rollouts", "grader=numeric"],
    "advantages": ["rewards=cached:rewards"],
    "policy": ["advantages=cached:advantages"],
    "report": ["rewards=cached:rewards"],
}


def measure() -> list[dict[str, Any]]:
    """Wall seconds from starting ``rollmill`` to its end; the best of four, since other work on the machine only adds.
    The slowest stage decides."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
        train = ["train", str(recipe), "run=cached"]
        _run(folder, train, "Report: ")
        _run(folder, ["stage", "report", *STAGES["report"]], "made ")  # the run's own report has more inputs
        seconds = {
            name: _seconds(folder, ["stage", name, *words], "was on the shelf; nothing was executed")
            for name, words in STAGES.items()
        }
        finished = _seconds(folder, train, "has finished; no stage was executed")
    slowest = max(seconds, key=lambda name: seconds[name])
    return [
        {
            "name": f"a cached stage, whole process (slowest of {len(seconds)}: {slowest})",
            "measured": f"{seconds[slowest]:.2f} s",
            "budget": f"< {BUDGET_S:.0f} s",
            "ok": seconds[slowest] < BUDGET_S,
        },
        {
            "name": "a finished training, whole process",
            "measured": f"{finished:.2f} s",
            "budget": "(no budget)",
            "ok": True,
        },
    ]


def _seconds(folder: str, words: list[str], says: str) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        _run(folder, words, says)
        times.append(time.perf_counter() - began)
    return min(times)


def _run(folder: str, words: list[str], says: str) -> None:
    command = [str(Path(sys.executable).with_name("rollmill")), *words, "--store", str(Path(folder) / "store")]
    environment = {**os.environ, "PREFECT_HOME": str(Path(folder) / "prefect"), "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode or says not in done.stdout:
        raise RuntimeError(f"rollmill {' '.join(words)} did not say {says!r}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    for row in measure():
        print(row)
