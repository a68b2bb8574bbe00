"""Messages between the pipeline and the trainer: one JSON object a line over a local socket."""

import json
import os
import select
import socket
from typing import Any

SOCKET_VARIABLE, PARENT_VARIABLE = "ROLLMILL_TRAINER_SOCKET", "ROLLMILL_TRAINER_PARENT"
COLLECTIVES_VARIABLE = "ROLLMILL_TRAINER_COLLECTIVES"


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None where none came in time.

        Raises:
            EOFError: the other end is gone.
        """
        while b"\n" not in self._received:
            if timeout_s is not None and not select.select([self._connection], [], [], timeout_s)[0]:
                return None
            try:
                more = self._connection.recv(65536)
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError("the connection was closed")
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


def connect_to_parent() -> Wire:
    """The trainer's end; where the pipeline listens is in the environment."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[SOCKET_VARIABLE])
    return Wire(connection)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
