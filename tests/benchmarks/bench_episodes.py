"""The pipeline without a model: 100,000 episodes of a built-in agent recorded and committed, and the memory it takes.

Each measurement is the whole command, in a process of its own: start, Prefect, every table and the commit.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLLMILL = str(Path(sys.executable).with_name("rollmill"))
FEW, MANY, MOST = 1_000, 50_000, 100_000
FLAT = 1.25
"""Peak memory at ``MANY`` episodes by that at ``FEW``, at most."""


@dataclass(frozen=True)
class Run:
    """One command."""

    wall_s: float
    peak_mib: float
    """Resident memory of the pipeline's process."""


def measure() -> list[dict[str, Any]]:
    """Single-turn episodes of 64 tokens at most over the scripted engine, on local disk."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = _made(folder, "policy", ["policy_init"])
        few, many, most = (_rollouts(folder, policy, n_episodes) for n_episodes in (FEW, MANY, MOST))
    rate, growth = MOST / most.wall_s, many.peak_mib / few.peak_mib
    return [
        {
            "name": f"{MOST:,} episodes over a scripted engine, the whole command",
            "measured": f"{rate:,.0f} episodes/s ({most.wall_s:.0f} s)",
            "budget": ">= 1,000 episodes/s",
            "ok": rate >= 1000,
        },
        {
            "name": f"peak memory, {MANY:,} episodes by {FEW:,}",
            "measured": f"{growth:.2f} ({many.peak_mib:,.0f} by {few.peak_mib:,.0f} MiB)",
            "budget": f"<= {FLAT}, and under 1,536 MiB",
            "ok": growth <= FLAT and many.peak_mib < 1536,
        },
    ]


def _rollouts(folder: Path, policy: str, n_episodes: int) -> Run:
    source = folder / f"{n_episodes}.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for n in range(n_episodes):
            file.write(json.dumps({"id": f"t{n}", "question": f"What is {n % 97} + {n % 89}?"}) + "\n")
    fields = 'fields={id: "{id}", instruction: "{question}"}'
    tasks = _made(folder, "tasks", ["tasks", "source={type: file}", fields, f"execution.location={source}"])
    command = ["rollouts", f"tasks={tasks}", f"policy={policy}", "engine={type: scripted, n_tokens: 64}"]
    began = time.perf_counter()
    with (folder / "said.txt").open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            [ROLLMILL, "stage", *command, "sampling.max_tokens=64"], cwd=folder, stdout=said, stderr=said
        )
        _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    if status:
        raise RuntimeError((folder / "said.txt").read_text(encoding="utf-8"))
    return Run(wall_s, usage.ru_maxrss / 1024)


def _made(folder: Path, kind: str, words: list[str]) -> str:
    """Runs a stage; returns the reference of what it made."""
    done = subprocess.run([ROLLMILL, "stage", *words], cwd=folder, check=True, capture_output=True, text=True)
    found = re.search(rf"{kind}/[0-9a-f]+", done.stdout)
    assert found is not None, done.stdout
    return found.group()
