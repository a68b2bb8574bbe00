"""Finds what a user names in a config: ``module:name`` or ``path/to/file.py:name``.

Loading runs the user's module, so it happens only for names that come from a config, never for
names that come with data.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from schemas.config import nearest
from schemas.errors import InputError, NotFoundError


def is_user_code(name: str) -> bool:
    """Whether ``name`` names user code, and not something built in."""
    return ":" in name


def load_object(name: str, what: str) -> Any:
    """The object called ``name``.

    Args:
        name: ``module:name`` (the working directory is searched too) or ``path/to/file.py:name``.
        what: what is being loaded, for messages (``"agent"``, ``"grader"``).
    Raises:
        NotFoundError: no such module, file or name.
        InputError: the module cannot be imported.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise NotFoundError(f"{what} {name!r} is neither 'module:name' nor 'path/file.py:name'")
    module = _module(module_name, what)
    if not hasattr(module, attribute):
        public = [word for word in vars(module) if not word.startswith("_")]
        raise NotFoundError(f"{what} {name!r}: {module_name} has no {attribute!r}", hint=nearest(attribute, public))
    return getattr(module, attribute)


def code_version(name: str, what: str) -> str:
    """Twelve digits of the hash of the source file that ``name`` lives in; for keys.

    Code that this file imports takes no part in it.
    """
    module = _module(name.rpartition(":")[0], what)
    source = getattr(module, "__file__", None)
    if source is None:
        raise InputError(f"{what} {name!r} has no source file, so its version cannot be told")
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]


def _module(module_name: str, what: str) -> ModuleType:
    try:
        if module_name.endswith(".py"):
            return _module_in_file(Path(module_name), what)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise NotFoundError(f"{what}: there is no module {module_name!r}") from None
        raise InputError(f"{what}: {module_name} cannot be imported: {error}") from error
    except NotFoundError:
        raise
    except Exception as error:
        raise InputError(f"{what}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error


def _module_in_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise NotFoundError(f"{what}: there is no file {path}")
    content = path.read_bytes()
    name = f"rollmill_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode() + content).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{what}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
