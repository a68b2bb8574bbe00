"""Rejection sampling: the best of each group, or all above a threshold, are imitated; the rest is left out.

    A_i = 1 where i is chosen, trained by cross-entropy

Source: RAFT, arXiv:2304.06767, algorithm 1 (best of group); ReST, arXiv:2308.08998, section 3 (threshold).
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from schemas.canonical import canonical_hash
from stages.advantages.estimators.base import Estimator, Objective, Samples

if TYPE_CHECKING:
    import polars as pl


class Rejection(Estimator):
    """Chosen trajectories have the advantage 1; the others 0 and the drop reason ``not_chosen``."""

    objective: ClassVar[Objective] = "cross_entropy"

    choose: Literal["best", "all"] = "best"
    """The best of each group (a tie is broken by a hash of the id), or every one that reaches the threshold."""
    threshold: float | None = None
    """Smallest reward that may be chosen; None: any, so that a group's best is chosen however bad it is."""

    @model_validator(mode="after")
    def _check_threshold(self) -> "Rejection":
        if self.choose == "all" and self.threshold is None:
            raise ValueError("choose: all needs a threshold")
        return self

    @property
    def compares_within_groups(self) -> bool:
        return self.threshold is None

    def estimate(self, samples: Samples) -> "pl.DataFrame":
        import polars as pl

        frame = samples.frame
        chosen = pl.col("reward") >= (float("-inf") if self.threshold is None else self.threshold)
        if self.choose == "best":
            is_best = pl.col("reward") == pl.col("reward").max().over("group_id")
            best = frame.filter(is_best).select("episode_id", "trajectory", "group_id")
            ties = pl.Series("tie", [canonical_hash(row[:2]) for row in best.iter_rows()], dtype=pl.String)
            first = best.with_columns(ties).filter(pl.col("tie") == pl.col("tie").min().over("group_id"))
            frame = frame.join(
                first.select("episode_id", "trajectory", is_first=True), on=["episode_id", "trajectory"], how="left"
            )
            chosen = chosen & pl.col("is_first").fill_null(False)
        return frame.with_columns(
            advantage=chosen.cast(pl.Float64),
            baseline=pl.lit(None, dtype=pl.Float64),
            drop_reason=pl.when(~chosen).then(pl.lit("not_chosen")),
        )
