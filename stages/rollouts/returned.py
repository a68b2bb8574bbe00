"""What an agent returned: its artifacts, and what its recorded calls are to be called."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.canonical import canonical_json
from schemas.records import Episode, Trajectory


@dataclass(frozen=True)
class Returned:
    """A legal return value, taken apart."""

    artifacts: str | None = None
    """Canonical JSON; None: nothing was returned."""
    names: dict[str, str] = field(default_factory=dict)
    """Name of the trajectory by the role under which its calls were made, where they differ."""


def returned(result: Any, role: str, recorded: Sequence[str]) -> Returned:
    """Takes apart what an agent returned.

    Args:
        role: the role of the agent's own config.
        recorded: the roles under which it has made calls.

    Raises:
        TypeError: it is nothing that an agent may return, or has no JSON form.
        ValueError: two of its trajectories have the same name.
    """
    result = as_episode(result)
    names: dict[str, str] = {}
    if isinstance(result, Episode):
        names = _names(result.trajectories, role, recorded)
        result = _artifacts(result)
    if result is None or result == {}:
        return Returned(names=names)
    if isinstance(result, str):
        result = {"answer": result}
    if not isinstance(result, dict):
        raise TypeError(
            f"the agent returned a {type(result).__name__}, and not an Episode, a Trajectory, a list of them, a dict, "
            "a string or None"
        )
    return Returned(canonical_json(result), names)


def as_episode(result: Any) -> Any:
    """One trajectory, or a list of them, as an episode; all else as it is."""
    if isinstance(result, Trajectory):
        result = [result]
    if isinstance(result, list) and all(isinstance(item, Trajectory) for item in result):
        return Episode(trajectories=result)
    return result


def _names(trajectories: list[Trajectory], role: str, recorded: Sequence[str]) -> dict[str, str]:
    """One trajectory that has no calls of its name gets those that the agent has made under no other one's name."""
    named = [trajectory.name for trajectory in trajectories]
    for name in named:
        if not isinstance(name, str) or not 1 <= len(name) <= 128:
            raise ValueError(f"a trajectory's name has 1 to 128 characters, and is not {name!r}")
        if named.count(name) > 1:
            raise ValueError(f"two of the returned trajectories are called {name!r}; give each a name of its own")
    unfilled = [name for name in named if name not in recorded]
    return {role: unfilled[0]} if len(unfilled) == 1 and role in recorded and role not in named else {}


def _artifacts(episode: Episode) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for trajectory in episode.trajectories:
        if trajectory.reward is not None or trajectory.signals:
            told[trajectory.name] = {"reward": trajectory.reward, "signals": trajectory.signals}
        if trajectory.output is not None:
            told.setdefault(trajectory.name, {})["output"] = trajectory.output
    notes: dict[str, Any] = {"metrics": episode.metrics, "metadata": episode.metadata, "trajectories": told}
    given: dict[str, Any] = {name: value for name, value in notes.items() if value}
    if episode.is_correct is not None:
        given["is_correct"] = episode.is_correct
    return {**episode.artifacts, **given}
