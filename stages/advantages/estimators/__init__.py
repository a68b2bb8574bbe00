"""The estimators by name. A new one is a file beside these and a line here."""

from stages.advantages.estimators.base import Estimator
from stages.advantages.estimators.grpo import Grpo
from stages.advantages.estimators.reinforce import Reinforce
from stages.advantages.estimators.rejection import Rejection
from stages.advantages.estimators.rloo import Rloo

ESTIMATORS: dict[str, type[Estimator]] = {"grpo": Grpo, "rloo": Rloo, "reinforce": Reinforce, "rejection": Rejection}
