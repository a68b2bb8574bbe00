"""The store against plain tools: writing and scanning rollouts, and what an artifact costs beside its work."""

import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.tables import TABLES
from stages.artifacts.commit import Request, materialise
from stages.artifacts.scan import scan
from stages.artifacts.store import Store, open_store
from tests.builders import Given, GivenConfig, NoExecution, episode_rows, numbers_request, step_rows

N_EPISODES = 20_000
N_TOKENS = 100
ALTERNATIONS = 15


def measure() -> list[dict[str, Any]]:
    """Ours against theirs on the same rows, in this process."""
    tables = _rollouts()
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store")
        writing = 1 / _time_ratio(lambda: _write(store, tables), lambda: _write_plain(Path(folder), tables))
        manifest = store.resolve(_write(store, tables))
        files = [
            str(Path(store.url) / f"artifacts/rollouts/{manifest.key}/{entry.path}")
            for entry in manifest.table_files("steps")
        ]
        scanning = _time_ratio(
            lambda: _question(scan(f"rollouts/{manifest.key}", "steps", store=store)),
            lambda: _question(pl.scan_parquet(files, hive_partitioning=False)),
        )
        overhead_ms = 1000 * _overhead(store)
    return [
        {
            "name": f"write rollouts, {N_EPISODES} x {N_TOKENS} tokens, speed against pyarrow",
            "measured": f"{writing:.2f}",
            "budget": ">= 0.70",
            "ok": writing >= 0.7,
        },
        {
            "name": "scan steps, time against polars on the files",
            "measured": f"{scanning:.2f}",
            "budget": "<= 1.10",
            "ok": scanning <= 1.1,
        },
        {
            "name": "store overhead of an artifact on local disk",
            "measured": f"{overhead_ms:.1f} ms",
            "budget": "< 10 ms",
            "ok": overhead_ms < 10,
        },
    ]


def _rollouts() -> dict[str, pa.Table]:
    """Episodes of one step each: Zipf-like ids and plausible logprobs, so that encodings have real work to do."""
    rng = np.random.default_rng(0)
    task_ids = [f"t{index:06d}" for index in range(N_EPISODES // 4)]
    episodes = pa.Table.from_pylist(episode_rows(task_ids, 4), schema=TABLES["episodes"].schema)
    ids = [row["episode_id"] for row in episode_rows(task_ids, 4)]
    steps = pa.Table.from_pylist(step_rows(ids), schema=TABLES["steps"].schema)
    offsets = pa.array(np.arange(0, N_EPISODES * N_TOKENS + 1, N_TOKENS), pa.int64())
    sampled = np.minimum(rng.zipf(1.3, N_EPISODES * N_TOKENS), 49_151).astype(np.int32)
    values = {
        "prompt_ids": sampled[::-1].copy(),
        "response_ids": sampled,
        "logprobs": -rng.exponential(0.7, N_EPISODES * N_TOKENS).astype(np.float32),
    }
    for name, flat in values.items():
        field = TABLES["steps"].schema.field(name)
        column = pa.LargeListArray.from_arrays(offsets, pa.array(flat, field.type.value_type)).cast(field.type)
        steps = steps.set_column(steps.schema.get_field_index(name), field, column)
    return {"episodes": episodes, "steps": steps}


def _write(store: Store, tables: dict[str, pa.Table]) -> str:
    stage = Given("rollouts", [tables], {}, {})
    request = Request(stage, GivenConfig(content=secrets.token_hex(8)), NoExecution())
    return f"rollouts/{materialise(store, request).manifest.key}"


def _write_plain(folder: Path, tables: dict[str, pa.Table]) -> None:
    for name, table in tables.items():
        pq.write_table(
            table, folder / f"{name}-{secrets.token_hex(8)}.parquet", compression="zstd", compression_level=1
        )


def _question(frame: pl.LazyFrame) -> pl.DataFrame:
    """Reads ids and heavy columns."""
    return frame.select(
        pl.col("episode_id").n_unique(),
        pl.col("response_ids").list.len().sum(),
        pl.col("logprobs").list.mean().mean(),
    ).collect()


def _overhead(store: Store) -> float:
    """Seconds that the store adds to a stage of one shard that makes one small table and one file."""
    times = []
    for draw in range(30):
        request = numbers_request(draw=draw, n_shards=1)
        began = time.perf_counter()
        manifest = materialise(store, request).manifest
        times.append(time.perf_counter() - began - manifest.work_s)
    return median(times)


def _time_ratio(ours: Callable[[], Any], plain: Callable[[], Any]) -> float:
    """Median over alternations of our time by the plain time just after it, so that drift cancels out."""
    ratios = []
    for number in range(ALTERNATIONS + 1):
        began = time.perf_counter()
        ours()
        between = time.perf_counter()
        plain()
        if number:  # the first pair only warms up
            ratios.append((between - began) / (time.perf_counter() - between))
    return median(ratios)
