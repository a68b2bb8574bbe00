"""What a person sees while a flow works: one line a stage, with shards and the stage's own units.

Stages report into a ``Reporter``; it knows nothing of how they are executed.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Reporter:
    """Shows the progress of the running stage and prints a line when it has finished."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self._lock = threading.Lock()

    def __enter__(self) -> "Reporter":
        if self.console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._bars.stop()

    def say(self, text: str) -> None:
        """Prints one line above the bars."""
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, title: str, key: str) -> Iterator[None]:
        """The bar of one stage while it works; shards in this process report to it by the artifact's key."""
        bar = self._bars.add_task(title, total=None)
        _BARS[key] = _StageBar(self._bars, bar)
        try:
            yield
        finally:
            del _BARS[key]
            self._bars.remove_task(bar)


def report(key: str, shard: str, n_shards: int, done: int, total: int) -> None:
    """Notes that ``done`` of ``total`` units of one shard are finished; shows nothing where nobody watches the key."""
    bar = _BARS.get(key)
    if bar is not None:
        bar.update(shard, n_shards, done, total)


class _StageBar:
    """Sums the progress of a stage's shards into one bar; shards not yet begun count as average."""

    def __init__(self, bars: Progress, bar: TaskID):
        self._bars = bars
        self._bar = bar
        self._lock = threading.Lock()
        self._shards: dict[str, tuple[int, int]] = {}

    def update(self, shard: str, n_shards: int, done: int, total: int) -> None:
        with self._lock:
            self._shards[shard] = (done, total)
            known = sum(total for _, total in self._shards.values())
            finished = sum(done for done, _ in self._shards.values())
        self._bars.update(self._bar, completed=finished, total=max(known * n_shards / len(self._shards), 1))


_BARS: dict[str, _StageBar] = {}
