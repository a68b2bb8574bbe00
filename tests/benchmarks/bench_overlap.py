"""``overlap: 1`` against ``overlap: 0``: wall time of one training, where sampling and training have a core each."""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from stages.artifacts.store import open_store

ROLLMILL = Path(sys.executable).with_name("rollmill")
ITERATIONS = 6
BUDGET = 0.85


def measure() -> list[dict[str, Any]]:
    """The demo's recipe with a policy of eight times the size, so that sampling and training are most of it, and one
    thread for each; medians over alternated runs."""
    with tempfile.TemporaryDirectory() as folder:
        ratios = []
        for number in range(3):
            one_after_the_other, overlapped = (
                _iterations_s(f"{folder}/store-{number}-{overlap}", overlap) for overlap in (0, 1)
            )
            ratios.append(overlapped / one_after_the_other)
    return [
        {
            "name": "training with overlap, wall time against without",
            "measured": f"{median(ratios):.2f} ({one_after_the_other:.1f} s, {overlapped:.1f} s)",
            "budget": f"<= {BUDGET}",
            "ok": median(ratios) <= BUDGET,
        }
    ]


def _iterations_s(store_url: str, overlap: int) -> float:
    """Seconds from the end of the first iteration, by which engine and trainer have started, to the end of the last;
    in a store of its own, where nothing can be reused."""
    changes = [f"iterations={ITERATIONS}", "policy.warmstart.training.steps=30", f"overlap={overlap}"]
    changes += ["policy.new={hidden_size: 256, n_layers: 4, max_length: 64}", "rollouts.batch.size=64"]
    changes += ["rollouts.sampling.max_tokens=24", "update.epochs=1"]
    changes += [f"run=overlap-{overlap}", "execution.rollouts.threads=1", "execution.policy.threads=1"]
    command = [str(ROLLMILL), "train", "configs/demo.yaml", *changes, "--store", store_url]
    subprocess.run(command, check=True, capture_output=True)
    records = open_store(store_url, writable=False).iterations(f"overlap-{overlap}")
    return (records[-1].finished_at - records[0].finished_at).total_seconds()
