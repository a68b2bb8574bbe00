"""Any environment of Gymnasium that speaks text: its observations are text, or it renders itself as text (``ansi``).

Actions are numbers (``Discrete``), by name where names are given, or the answer's whole text (``Text``).
"""

import importlib.util
import re
from typing import Any, ClassVar

from pydantic import Field

from schemas.config import ConfigModel
from schemas.errors import ConfigError, InputError
from stages.rollouts.patterns.environments.base import Outcome, TextEnvironment


class GymConfig(ConfigModel):
    """Which environment, and how it is spoken to."""

    id: str = Field(min_length=1)
    """As ``gymnasium.make`` takes it: ``FrozenLake-v1``, or ``module:Name-v0`` of a module that registers it. The
    version of that code does not enter the key: raise the environment's own version when it changes."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of ``gymnasium.make``."""
    rules: str = ""
    """What the player must know; Gymnasium has no place for it."""
    action_names: list[str] | None = Field(default=None, min_length=1)
    """Words for the actions of a ``Discrete`` space, in order. None: their numbers."""
    solved_at: float = 1.0
    """Reward of a last step from which on the game counts as solved, where the environment does not say
    ``is_success`` itself."""


class Gym(TextEnvironment):
    """Plays one episode of a Gymnasium environment."""

    Config: ClassVar[type[ConfigModel]] = GymConfig
    may_take_long: ClassVar[bool] = True

    def __init__(self, config: GymConfig):
        if importlib.util.find_spec("gymnasium") is None:
            raise ConfigError("the environment 'gymnasium' needs Gymnasium", hint="pip install 'rollmill[gym]'")
        import gymnasium
        from gymnasium import spaces

        self._config = config
        try:
            self._env = gymnasium.make(config.id, **{"render_mode": "ansi", **config.arguments})
        except gymnasium.error.Error as error:
            raise ConfigError(f"gymnasium.make({config.id!r}): {error}") from None
        space = self._env.action_space
        self._is_text = isinstance(space, spaces.Text)
        if isinstance(space, spaces.Discrete):
            first = int(space.start)
            names = config.action_names or [str(first + number) for number in range(int(space.n))]
            if len(names) != space.n:
                raise ConfigError(f"{config.id} has {space.n} actions, and action_names has {len(names)}")
            self._actions = {name.lower(): first + number for number, name in enumerate(names)}
            words = "|".join(re.escape(name) for name in sorted(self._actions, key=len, reverse=True))
            self._word = re.compile(rf"(?<!\w)({words})(?!\w)", re.IGNORECASE)
        elif not self._is_text:
            raise InputError(f"{config.id} takes actions of {space}, and only Discrete and Text can be said in words")

    @property
    def rules(self) -> str:
        return self._config.rules

    def reset(self, seed: int) -> str:
        observation, _ = self._env.reset(seed=seed % 2**31)
        return self._seen(observation)

    def parse(self, text: str) -> Any:
        if self._is_text:
            return text if self._env.action_space.contains(text) else None
        found = self._word.findall(text)
        return self._actions[found[-1].lower()] if found else None

    def step(self, action: Any) -> Outcome:
        observation, reward, terminated, truncated, info = self._env.step(action)
        is_over = bool(terminated or truncated)
        is_solved = bool(info.get("is_success", terminated and float(reward) >= self._config.solved_at))
        return Outcome(self._seen(observation), float(reward), is_over, is_over and is_solved)

    def close(self) -> None:
        self._env.close()

    def _seen(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        rendered = self._env.render()
        if not isinstance(rendered, str):
            raise InputError(f"{self._config.id} neither observes nor renders text (render_mode 'ansi')")
        return re.sub(r"\x1b\[(\d+)m(.*?)\x1b\[0m", r"[\2]", rendered).strip()  # what is coloured is marked
