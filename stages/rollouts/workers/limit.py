"""How many calls a server gets at once: enough that it never runs dry, few enough that they do not queue for long."""

from stages.rollouts.workers.server import Load

_FIRST = 256
_SPARE = 16
"""Calls that wait in a server at least, ready to take the place of those that end."""


class Limit:
    """Adapts to what the server reports: it may have about as many waiting as running."""

    def __init__(self, largest: int):
        self._largest = largest
        self._crowded: Load | None = None
        """The last report, if too many waited."""
        self.value = min(_FIRST, largest)

    def observe(self, load: Load, in_flight: int) -> None:
        """Takes in a report, given the calls that we have there."""
        spare = max(_SPARE, load.running)
        before, self._crowded = self._crowded, load if load.waiting > spare else None
        if self._crowded is not None:
            if before is not None:  # once may be the first moment of a burst, of which few have begun
                running = max(before.running, load.running)
                self.value = max(1, min(self._largest, running + max(_SPARE, running)))
        elif load.waiting < spare // 2 and in_flight >= self.value:
            self.value = min(self._largest, 2 * self.value)
