"""What an iteration of ``train`` costs beside sampling and training: with engine and trainer warm, under 2 s."""

import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl

from stages.artifacts.scan import scan
from stages.artifacts.store import open_store

ROLLMILL = Path(sys.executable).with_name("rollmill")


def measure() -> list[dict[str, Any]]:
    """The demo's recipe with a short warm start; the first iteration, in which processes start, is left out."""
    with tempfile.TemporaryDirectory() as folder:
        store_url = f"{folder}/store"
        changes = ["iterations=5", "policy.warmstart.training.steps=30", "run=bench"]
        subprocess.run(
            [ROLLMILL, "train", "configs/demo.yaml", *changes, "--store", store_url], check=True, capture_output=True
        )
        store = open_store(store_url, writable=False)
        records = store.iterations("bench")
        training = scan("bench", "metrics", store=store).filter(pl.col("name") == "train_s").collect()
        training_s = dict(zip(training["iteration"], training["value"], strict=True))
        overheads = []
        for before, record in pairwise(records):
            wall_s = (record.finished_at - before.finished_at).total_seconds()
            sampling_s = store.manifest(record.artifacts["rollouts"]).summary["sampling_s"]
            overheads.append(wall_s - sampling_s - training_s[record.iteration])
    cost = median(overheads)
    return [
        {
            "name": "an iteration beside sampling and training",
            "measured": f"{cost:.2f} s (of {wall_s:.2f} s)",
            "budget": "< 2 s",
            "ok": cost < 2,
        }
    ]
