"""When an endpoint may be asked: evenly spread calls, and a pause for all of them where it asks for one."""

import asyncio
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


class Pace:
    """Of all calls to one endpoint, in one event loop."""

    def __init__(self, requests_per_minute: float | None):
        self._gap_s = 0.0 if requests_per_minute is None else 60.0 / requests_per_minute
        self._next = 0.0
        self._held_until = 0.0

    async def turn(self) -> None:
        """Waits until the next call may begin."""
        at = max(self._next, time.monotonic())
        self._next = at + self._gap_s
        while (wait_s := max(at, self._held_until) - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)

    def hold(self, wait_s: float) -> None:
        """No call begins before so many seconds have gone."""
        self._held_until = max(self._held_until, time.monotonic() + wait_s)


def retry_after(header: str | None, now: datetime | None = None) -> float | None:
    """Seconds that a ``Retry-After`` asks for, given as seconds or as an HTTP date; None: it asks for none."""
    if header is None:
        return None
    try:
        wait_s = float(header)
    except ValueError:
        try:
            until = parsedate_to_datetime(header)
        except ValueError:
            return None
        until = until if until.tzinfo else until.replace(tzinfo=UTC)
        wait_s = (until - (now or datetime.now(UTC))).total_seconds()
    return max(0.0, wait_s) if wait_s < float("inf") else None
