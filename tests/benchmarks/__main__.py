"""Runs every benchmark module and prints what was measured against its budget; exits 1 where one is not held."""

import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import tests.benchmarks


def main() -> int:
    """Each module ``bench_*`` has ``measure() -> list[{name, measured, budget, ok}]``; arguments choose modules."""
    chosen = sys.argv[1:]
    rows: list[dict[str, Any]] = []
    for info in pkgutil.iter_modules(tests.benchmarks.__path__):
        if info.name.startswith("bench_") and (not chosen or info.name.removeprefix("bench_") in chosen):
            print(f"measuring {info.name.removeprefix('bench_')} …", file=sys.stderr)
            rows += importlib.import_module(f"tests.benchmarks.{info.name}").measure()
    table = Table("what", "measured", "budget", "held")
    for row in rows:
        table.add_row(row["name"], row["measured"], row["budget"], "yes" if row["ok"] else "[red]no[/]")
    Console().print(table)
    Path("build").mkdir(exist_ok=True)
    Path("build/bench.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
