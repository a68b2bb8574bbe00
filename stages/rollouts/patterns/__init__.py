"""The built-in agents by name. A new one is a file beside these and a line here."""

from stages.rollouts.patterns import debate, environment, react, refine, single_turn, solver_judge
from stages.rollouts.patterns.base import Pattern

PATTERNS: dict[str, Pattern] = {
    "single_turn": single_turn.PATTERN,
    "react": react.PATTERN,
    "refine": refine.PATTERN,
    "solver_judge": solver_judge.PATTERN,
    "debate": debate.PATTERN,
    "environment": environment.PATTERN,
}
