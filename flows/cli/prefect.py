"""Prefect as the command line uses it: quiet, with the settings that a short run wants, and a server in this process.

Where no server is configured, Prefect would start one as a child process: three seconds of work more, and it
outlives a command that is killed. A thread dies with its process.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from schemas.errors import RollmillError

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
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    with ExitStack() as stack:
        url = PREFECT_API_URL.value() or stack.enter_context(_server())
        # The heartbeat's thread is joined at the end of every flow run, which costs a second.
        stack.enter_context(temporary_settings({PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}))
        yield


@contextmanager
def _server() -> Iterator[str]:
    """Prefect's API on a free port of the loopback, served by a thread; its history lies where Prefect keeps it."""
    import uvicorn
    from prefect.events.worker import EventsWorker
    from prefect.server.api.server import create_app

    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = create_app(ephemeral=True, ignore_cache=True)
        server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_level="error", timeout_graceful_shutdown=5))
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listening]}, name="prefect-server", daemon=True
        )
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        if not server.started:
            raise RollmillError(
                "Prefect's server did not start; its own message stands above",
                hint="can the folder PREFECT_HOME (~/.prefect) be written? PREFECT_API_URL names a server that runs",
            )
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        finally:
            EventsWorker.drain_all(timeout=5)
            time.sleep(0.5)  # the server records how the last tasks ended, and forgets at its end what it has not read
            # A query that its end cuts short is told with a traceback, and harms nothing.
            logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
            server.should_exit = True
            thread.join()
