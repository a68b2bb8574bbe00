"""The built-in graders by name. A new one is a file beside these and a line here."""

from stages.rewards.graders.agent import Agent
from stages.rewards.graders.base import Grader
from stages.rewards.graders.exact import Exact
from stages.rewards.graders.math import Math
from stages.rewards.graders.numeric import Numeric

GRADERS: dict[str, type[Grader]] = {"exact": Exact, "numeric": Numeric, "math": Math, "agent": Agent}
