"""Prefect as the command line uses it: quiet, and with the settings that a short run wants."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_QUIET = {
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Flows called inside log nothing, unless the user's environment says otherwise. Enter it before their import."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    # The heartbeat's thread is joined at the end of every flow run, which costs a second.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield
