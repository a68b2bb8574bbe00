"""Which Rollmill and which libraries do the work: looked up once a process, nothing heavy imported."""

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from schemas.artifacts import CodeVersion

ROOT = Path(__file__).resolve().parents[2]

_LIBRARIES = (
    "deepspeed", "fsspec", "math-verify", "numpy", "polars", "prefect", "pyarrow", "pydantic",
    "s3fs", "safetensors", "tokenizers", "torch", "transformers", "vllm",
)  # fmt: skip


@cache
def code_version() -> CodeVersion:
    """This Rollmill: its version, and the commit where it runs from a checkout."""
    try:
        version = metadata.version("rollmill")
    except metadata.PackageNotFoundError:
        version = "unknown"
    commit, dirty = _checkout(ROOT)
    return CodeVersion(version=version, commit=commit, dirty=dirty)


@cache
def library_versions() -> dict[str, str]:
    """Versions of Python and of the installed libraries that can change a result."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def changes_since(code: CodeVersion, libraries: Mapping[str, str]) -> list[str]:
    """What differs between the code that once did some work and the code that runs now; empty: nothing."""
    now, changes = code_version(), []
    if code.version != now.version:
        changes.append(f"rollmill {code.version} -> {now.version}")
    if (code.commit, code.dirty) != (now.commit, now.dirty):
        changes.append(f"commit {_shown(code)} -> {_shown(now)}{_changed_files(code)}")
    elif code.dirty:
        changes.append(f"commit {_shown(code)}: what was changed then is not known")
    current = library_versions()
    changes += [
        f"{name} {libraries.get(name, 'absent')} -> {current.get(name, 'absent')}"
        for name in sorted(libraries.keys() | current.keys())
        if libraries.get(name) != current.get(name)
    ]
    return changes


def _shown(code: CodeVersion) -> str:
    if code.commit is None:
        return "unknown"
    return code.commit[:12] + (" with uncommitted changes" if code.dirty else "")


def _changed_files(code: CodeVersion) -> str:
    """Which source files differ between the commit and the checkout, in brackets; empty where git cannot tell."""
    output = _git(ROOT, "diff", "--name-only", code.commit, "--", "schemas", "stages") if code.commit else None
    names = (output or "").split()
    if not names:
        return ""
    return f" ({', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''})"


def _checkout(root: Path) -> tuple[str | None, bool | None]:
    output = _git(root, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if output is None:
        return None, None
    lines = output.splitlines()
    commit = next((line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")), None)
    if commit is None or commit == "(initial)":
        return None, None
    return commit, any(not line.startswith("#") for line in lines)


def _git(root: Path, *arguments: str) -> str | None:
    if not (root / ".git").exists():
        return None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], env=environment, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
