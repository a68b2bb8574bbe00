"""REINFORCE: the reward itself, or the reward against the mean of the whole batch.

    A_i = r_i - b,   b = 0 or mean over all trajectories of the batch

Source: Williams 1992, doi:10.1007/BF00992696, with its reinforcement baseline.
"""

import math
from typing import TYPE_CHECKING, Literal

from stages.advantages.estimators.base import Estimator, Samples

if TYPE_CHECKING:
    import polars as pl


class Reinforce(Estimator):
    """Advantages that compare with no group, so groups of one and of equal rewards count like any other."""

    baseline: Literal["none", "batch_mean"] = "batch_mean"
    """What is subtracted from each reward."""

    @property
    def compares_within_groups(self) -> bool:
        return False

    def estimate(self, samples: Samples) -> "pl.DataFrame":
        import polars as pl

        rewards = samples.frame["reward"]
        if self.baseline == "none" or rewards.is_empty():
            return samples.frame.with_columns(advantage=pl.col("reward"), baseline=pl.lit(None, dtype=pl.Float64))
        mean = math.fsum(rewards) / len(rewards)  # exactly rounded, so independent of order and threads
        return samples.frame.with_columns(advantage=pl.col("reward") - mean, baseline=pl.lit(mean))
