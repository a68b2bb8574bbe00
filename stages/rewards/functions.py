"""A user's grader function, ``module:function`` or ``path/file.py:function``: found, versioned and loaded.

The pipeline's own process only reads the source (``source_version``); a worker process imports it (``load_function``).
"""

import ast
import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from schemas.config import nearest
from schemas.errors import InputError, NotFoundError
from schemas.loading import load_object
from schemas.syntax import parsed_module


def source_version(name: str) -> str:
    """The version that enters the key, found without running any of the user's code.

    It is what the author wrote in ``@evaluator(version="…")`` or as the file's ``__version__``; else a hash of the
    source file, 16 hexadecimal digits. Files that it imports are not seen: raise the version when they change.

    Raises:
        NotFoundError: no such file, module or function.
        InputError: the file is no Python, or its version is no literal.
    """
    path, function = _source_path(name)
    text = path.read_bytes()
    try:
        tree = parsed_module(text, str(path))
    except (SyntaxError, ValueError) as error:
        raise InputError(f"grader {name!r}: {path} is not valid Python: {error}") from None
    defined = dict(_definitions(tree.body))
    if function not in defined and "*" not in defined:
        raise NotFoundError(f"grader {name!r}: {path} defines no {function!r}", hint=nearest(function, list(defined)))
    stated = _stated_version(defined.get(function), defined.get("__version__"))
    if stated is None:
        return hashlib.sha256(text).hexdigest()[:16]
    if not isinstance(stated, ast.Constant) or not isinstance(stated.value, str):
        raise InputError(f"grader {name!r}: its version in {path}, line {stated.lineno}, is not a string literal")
    return stated.value


def load_function(name: str, params: dict[str, Any]) -> tuple[Callable[..., Any], bool]:
    """Imports the function. Only for worker processes.

    Returns:
        the function, and whether it wants each trajectory (three arguments) instead of an episode (two).
    Raises:
        TypeError: for another number of arguments, or ``params`` that it does not take.
    """
    grade: Callable[..., Any] = load_object(name, "grader")
    signature = inspect.signature(grade)
    for per_trajectory, values in ((True, (None, None, None)), (False, (None, None))):
        try:
            signature.bind(*values, **params)
        except TypeError:
            continue
        return grade, per_trajectory
    takes = f"params {sorted(params)}" if params else "no params"
    raise TypeError(
        f"{name} is called as (task, episode) or (task, episode, trajectory) with {takes}; it is {signature}"
    )


def _source_path(name: str) -> tuple[Path, str]:
    module, _, function = name.rpartition(":")
    if not module or not function.isidentifier():
        raise NotFoundError(f"grader {name!r} is neither 'module:function' nor 'path/file.py:function'")
    if module.endswith(".py"):
        path = Path(module).expanduser().resolve()
        if not path.is_file():
            raise NotFoundError(f"grader {name!r}: there is no file {path}")
        return path, function
    spec = _module_spec(module)
    if spec is None:
        raise NotFoundError(f"grader {name!r}: there is no module {module!r}, installed or in this folder")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise InputError(f"grader {name!r}: the module {module!r} has no Python source to take a version from")
    return Path(spec.origin), function


def _module_spec(module: str) -> ModuleSpec | None:
    """The module's place, without importing its parent packages as ``importlib.util.find_spec`` would."""
    head, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(head) or PathFinder.find_spec(head, [str(Path.cwd())])
    except (ImportError, ValueError):
        return None
    full_name = head
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full_name = f"{full_name}.{part}"
        spec = PathFinder.find_spec(full_name, list(spec.submodule_search_locations))
    return spec


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and node.value is not None:
                    yield target.id, node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).partition(".")[0], node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body + node.orelse)


def _stated_version(function: ast.AST | None, module_version: ast.AST | None) -> ast.expr | None:
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("evaluator"):
                for keyword in decorator.keywords:
                    if keyword.arg == "version":
                        return keyword.value
    return module_version if isinstance(module_version, ast.expr) else None
