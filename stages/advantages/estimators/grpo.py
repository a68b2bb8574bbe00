"""GRPO: each reward against the mean of its group, in units of the group's spread.

    A_i = (r_i - mean(r)) / (std(r) + eps)

Source: DeepSeekMath, arXiv:2402.03300, eq. 3 and section 4.1.2. ``std: none`` is Dr. GRPO, arXiv:2503.20783.
"""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from stages.advantages.estimators.base import Estimator, Samples

if TYPE_CHECKING:
    import polars as pl


class Grpo(Estimator):
    """Group-relative advantages."""

    std: Literal["sample", "population", "none"] = "sample"
    """Divides by the square root of the sum of squares over n-1 (sample) or n (population), or not at all."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the root, in the unit of the reward."""

    def estimate(self, samples: Samples) -> "pl.DataFrame":
        import polars as pl

        n = pl.col("group_size")
        to_population = ((n - 1) / n).sqrt() if self.std == "population" else 1.0
        scale = 1.0 if self.std == "none" else pl.col("group_std") * to_population + self.eps
        return samples.frame.with_columns(
            advantage=(pl.col("reward") - pl.col("group_mean")) / scale,
            baseline=pl.col("group_mean"),
        )
