"""Groups of attempts and their statistics: in float64, in two passes, and exact where all rewards are equal."""

import itertools
import math
from typing import TYPE_CHECKING

from schemas.canonical import canonical_hash

if TYPE_CHECKING:
    import polars as pl

ID = ["episode_id", "trajectory"]


def with_group_ids(frame: "pl.DataFrame") -> "pl.DataFrame":
    """Adds ``group_id``: a hash of task id and trajectory name, so that no characters in them can merge groups."""
    import polars as pl

    groups = frame.select("task_id", "trajectory").unique().sort("task_id", "trajectory")
    ids = pl.Series("group_id", [canonical_hash(row)[:32] for row in groups.iter_rows()], dtype=pl.String)
    return frame.join(groups.with_columns(ids), on=["task_id", "trajectory"], how="left")


def with_statistics(known: "pl.DataFrame") -> "pl.DataFrame":
    """Adds ``group_size``, ``group_mean``, ``group_std`` (n-1) and ``is_flat`` to rows whose rewards are all known.

    ``is_flat`` marks groups in which no reward differs from another, those of one included; their mean is that
    reward and their spread 0 exactly, whatever rounding would make of them.

    Args:
        known: sorted by group.
    """
    import polars as pl

    n, reward = pl.col("group_size"), pl.col("reward")
    flat = reward.min().over("group_id") == reward.max().over("group_id")
    known = known.with_columns(group_size=pl.len().over("group_id").cast(pl.Int32), is_flat=flat)
    mean = pl.when("is_flat").then(reward).otherwise(group_sums(known, reward) / n)
    known = known.with_columns(group_mean=mean)
    squares = group_sums(known, (reward - pl.col("group_mean")) ** 2)
    return known.with_columns(group_std=pl.when(n > 1).then((squares / (n - 1)).sqrt()))


def group_sums(frame: "pl.DataFrame", values: "pl.Expr") -> "pl.Series":
    """For each row the sum of ``values`` over its group, exactly rounded.

    So it depends neither on the order of the rows nor on the number of threads, as ``values.sum().over(…)`` does
    in its last digits.

    Args:
        frame: sorted by ``group_id``.
    """
    import polars as pl

    sizes = frame.group_by("group_id", maintain_order=True).agg(pl.len())["len"].to_list()
    numbers = frame.select(values).to_series().to_list()
    bounds = [0, *itertools.accumulate(sizes)]
    sums = [math.fsum(numbers[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return pl.Series([total for total, size in zip(sums, sizes, strict=True) for _ in range(size)], dtype=pl.Float64)
