"""Work that goes on beside the flow's own thread: the next iteration is sampled while this one trains."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from typing import Generic, TypeVar

from flows.execute import end_with_main_thread

Result = TypeVar("Result")


class Ahead(Generic[Result]):
    """One piece of work in a thread of its own, which sees the same Prefect flow run."""

    def __init__(self, work: Callable[[], Result]):
        self._outcome: Future[Result] = Future()
        context = copy_context()
        # A daemon: an interrupted process must not wait for it. What it has not finished is not in the store.
        threading.Thread(target=lambda: context.run(self._run, work), name="rollmill-ahead", daemon=True).start()

    def result(self) -> Result:
        """Waits; raises what the work raised."""
        self.settle()
        return self._outcome.result()

    def settle(self) -> None:
        """Waits until it has ended, well or not."""
        try:
            while not self._outcome.done():  # in short waits: polars' signal handler keeps interrupts from long ones
                wait([self._outcome], timeout=0.5)
        except BaseException:  # interrupted, or asked to terminate
            self.abandon()
            raise

    def abandon(self) -> None:
        """Lets the process end without it."""
        if not self._outcome.done():
            end_with_main_thread()

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self._outcome.set_result(work())
        except BaseException as error:
            self._outcome.set_exception(error)
