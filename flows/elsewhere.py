"""What a process of a cluster does before it works for a command: it goes where the command was called, and forgets
code that an earlier command has left loaded."""

import importlib
import os
import socket
import sys
from pathlib import Path

from schemas.errors import StageFailed

_OURS = ("flows", "rollmill", "schemas", "stages")
_last_command = ""


def work_in(folder: str, command: str) -> None:
    """What is imported and read by a relative name is found from now on as the command's own process finds it.

    Raises:
        StageFailed: this machine has no such folder.
    """
    global _last_command
    try:
        os.chdir(folder)
    except OSError as error:
        raise StageFailed(
            f"a process of the cluster on {socket.gethostname()} has no folder {folder}, where the command was called",
            hint="call it in a folder that all machines of the cluster share",
        ) from error
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if command != _last_command:
        _forget_users_code()
        _last_command = command


def _forget_users_code() -> None:
    """It may have changed since: the key is made of what lies in its files now, and so must the work be."""
    installed = Path(sys.prefix).resolve()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name == "__main__" or name.partition(".")[0] in _OURS:
            continue
        path = Path(file).resolve()
        is_users = any(path.is_relative_to(place) for place in map(Path, sys.path) if place.is_absolute())
        if is_users and not path.is_relative_to(installed) and not path.is_relative_to(Path(os.__file__).parent):
            del sys.modules[name]
    importlib.invalidate_caches()
