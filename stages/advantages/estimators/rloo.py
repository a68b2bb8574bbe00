"""RLOO: each reward against the mean of the others in its group.

    A_i = r_i - (sum_{j != i} r_j) / (n - 1)  =  (r_i - mean(r)) * n / (n - 1)

Source: Back to Basics, arXiv:2402.14740, eq. 5.
"""

from typing import TYPE_CHECKING

from stages.advantages.estimators.base import Estimator, Samples

if TYPE_CHECKING:
    import polars as pl


class Rloo(Estimator):
    """Leave-one-out advantages. The second form is computed: it loses no digits where rewards are close."""

    def estimate(self, samples: Samples) -> "pl.DataFrame":
        import polars as pl

        n = pl.col("group_size")
        deviation = pl.col("reward") - pl.col("group_mean")
        return samples.frame.with_columns(
            advantage=deviation * n / (n - 1),
            baseline=pl.when(n > 1).then(pl.col("group_mean") - deviation / (n - 1)),
        )
