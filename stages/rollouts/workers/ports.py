"""Ports for servers on this machine, held so that no two of ours ever share one."""

import errno
import socket

from schemas.errors import StageFailed

_TRIES = 100


class HeldPort:
    """A port of the loopback that nobody listens on. While it is held no other pipeline is given it, but a server can
    listen there that takes over ports from before (``SO_REUSEADDR``), as every server does."""

    def __init__(self, number: int):
        self._socket = socket.socket()
        try:
            self._socket.bind(("127.0.0.1", number))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]
        # Said only now: said before, it would have let us in where another of ours holds the port already.
        for option in ("SO_REUSEADDR", "SO_REUSEPORT"):
            if hasattr(socket, option):
                self._socket.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)

    def release(self) -> None:
        self._socket.close()


def hold_port(first: int | None) -> HeldPort:
    """A free port; the next from ``first`` on, or any where that is None.

    Raises:
        StageFailed: none is free.
    """
    if first is None:
        return HeldPort(0)
    for number in range(first, min(first + _TRIES, 65_536)):
        try:
            return HeldPort(number)
        except OSError as taken:
            if taken.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise StageFailed(f"no port from {first} to {first + _TRIES - 1} is free", hint="set execution.rollouts.vllm.port")
