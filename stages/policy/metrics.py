"""The ``metrics`` table of a policy: measurements by name, and when they were recorded."""

from collections.abc import Mapping
from datetime import UTC, datetime

import pyarrow as pa

from schemas.tables import METRICS


def metrics_table(stage: str, values: Mapping[str, float | None]) -> pa.Table:
    """Measurements of this stage; run and iteration are unknown to it and stay null.

    Args:
        values: by name; None: could not be measured.
    """
    now = datetime.now(UTC)
    rows = [
        {"run": None, "iteration": None, "stage": stage, "name": name, "value": value, "recorded_at": now}
        for name, value in values.items()
    ]
    return pa.Table.from_pylist(rows, schema=METRICS.schema)
