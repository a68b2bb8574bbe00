"""The inside of the sandbox's process: gives up rights, then runs the code that comes on stdin.

Run as a script by ``sandbox.py`` with: MiB of memory, seconds of time, bytes of a file. It imports the standard library
and nothing else.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
import sysconfig

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
"""Numbers of the system calls, the same on all architectures."""
_READ = 1 << 2 | 1 << 3
"""Landlock's rights to read a file and to list a folder."""
_ALL_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1}
"""Rights on files that each version of Landlock knows; later ones as the third."""
_NO_NEW_PRIVILEGES = 38
_REFUSED = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill",
            "pty.", "ctypes.", "shutil.", "os.putenv", "os.setxattr", "signal.pthread_kill", "resource.",
            "webbrowser.", "ftplib.", "http.", "urllib.", "smtplib.", "sqlite3.", "syslog.")  # fmt: skip
_ON_PATHS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link",
             "os.symlink", "os.chmod", "os.chown", "os.truncate", "os.chdir", "os.walk", "glob.glob")  # fmt: skip


def main(memory_mb: int, time_s: float, file_bytes: int) -> None:
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    library = sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
    folder = os.path.realpath(os.getcwd())
    import linecache  # noqa: F401  (what a traceback needs)
    import traceback

    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.unshare(_NEW_USER | _NEW_NET)
        _forbid_files(libc, read=library, write=[folder])
    _limit(memory_mb, time_s, file_bytes)
    sys.addaudithook(_hook(folder, library))
    names = {"__name__": "__main__"}
    try:
        exec(compile(code, "<code>", "exec"), names)  # the purpose of this process
    except SystemExit:
        pass
    except BaseException as error:
        sys.stdout.flush()
        print("".join(traceback.format_exception_only(error)).strip())
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _limit(memory_mb: int, time_s: float, file_bytes: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_mb * 2**20,
        resource.RLIMIT_CPU: int(time_s) + 1,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 0,
    }
    for which, most in limits.items():
        try:
            resource.setrlimit(which, (most, most))
        except (ValueError, OSError):  # systems whose kernel has no such limit
            continue
    signal.setitimer(signal.ITIMER_REAL, time_s)


def _forbid_files(libc: ctypes.CDLL, read: list[str], write: list[str]) -> None:
    """With Landlock, where the kernel has it: files can be read in the one and written in the other folders only."""
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return
    rights = _ALL_RIGHTS.get(version, (1 << 15) - 1)
    ruleset = libc.syscall(_LANDLOCK_CREATE, struct.pack("Q", rights), ctypes.c_size_t(8), 0)
    for paths, allowed in ((read, _READ), (write, rights)):
        for path in paths:
            parent = os.open(path, os.O_PATH)
            libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, parent), 0)
            os.close(parent)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _hook(folder: str, library: list[str]):
    """Refuses what the code has no business with."""

    def is_inside(path: object, folders: list[str]) -> bool:
        if isinstance(path, bytes):
            path = path.decode("utf-8", "surrogateescape")
        if not isinstance(path, str):
            return isinstance(path, int)  # a file that is open already
        real = os.path.realpath(path)
        return any(real == inner or real.startswith(inner + os.sep) for inner in folders)

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event in _ON_PATHS:
            reads = event in ("os.listdir", "os.scandir") or (
                event == "open" and not set(str(arguments[1] or "")) & set("wax+")
                and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )  # fmt: skip
            if not is_inside(arguments[0], [folder, *library] if reads else [folder]):
                raise PermissionError(f"{event} of {arguments[0]!r} is not allowed here")

    return hook


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
