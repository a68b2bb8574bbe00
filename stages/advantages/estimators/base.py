"""What an estimator is: a config model (its parameters) that gives each trajectory an advantage.

The policy stage reads its numbers as data and never learns which estimator made them; only the
``objective`` says how they are meant.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from schemas.config import ConfigModel

if TYPE_CHECKING:
    import polars as pl

Objective = Literal["policy_gradient", "cross_entropy"]


@dataclass(frozen=True)
class Samples:
    """What an estimator sees."""

    frame: "pl.DataFrame"
    """One row per trajectory whose reward is known, sorted by group and id: ``episode_id``, ``trajectory``,
    ``group_id``, ``reward`` (float64), ``group_mean``, ``group_std`` (n-1; null in a group of one), ``group_size``.
    Further sums over groups: ``stages.advantages.groups.group_sums``, whose last digits do not depend on threads."""
    scan: "Callable[[str, str], pl.LazyFrame]"
    """Any table of an input, for estimators that work on tokens or signals: ``scan("rollouts", "steps")``."""


class Estimator(ConfigModel, ABC):
    """Its fields are ``advantages.params`` and enter the key."""

    objective: ClassVar[Objective] = "policy_gradient"
    """How the policy stage is meant to train on the advantages."""

    @property
    def compares_within_groups(self) -> bool:
        """Whether a group of one, or one whose rewards are all equal, says nothing: its advantages are then 0."""
        return True

    @abstractmethod
    def estimate(self, samples: Samples) -> "pl.DataFrame":
        """The rows of ``samples.frame`` with further columns, in any order.

        Returns:
            ``advantage`` (float64) and ``baseline`` (float64; null where nothing was subtracted); where it has
            something to say also ``drop_reason`` (null: kept) and ``token_advantages`` (one per sampled token).
        """
