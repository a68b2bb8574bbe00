"""Start-up: ``import rollmill`` and ``rollmill --help`` are immediate and import nothing heavy."""

import subprocess
import sys
import time
from statistics import median
from typing import Any

HEAVY = ("torch", "transformers", "deepspeed", "vllm", "prefect")


def measure() -> list[dict[str, Any]]:
    """Wall seconds of whole processes, the bare interpreter's own start subtracted; median of five."""
    bare = _seconds("pass")
    imported = _seconds("import rollmill") - bare
    help_page = _seconds("import sys; sys.argv = ['rollmill', '--help']; from flows.cli import main; main()") - bare
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys, rollmill; print([m for m in {HEAVY!r} if m in sys.modules])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return [
        {"name": "import rollmill", "measured": f"{imported:.2f} s", "budget": "< 0.5 s", "ok": imported < 0.5},
        {"name": "rollmill --help", "measured": f"{help_page:.2f} s", "budget": "< 0.5 s", "ok": help_page < 0.5},
        {"name": "heavy modules after import rollmill", "measured": loaded, "budget": "[]", "ok": loaded == "[]"},
    ]


def _seconds(code: str) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return median(times)
