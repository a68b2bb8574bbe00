"""Reads Python's syntax, for any number of threads."""

import ast
import threading

_ONE_AT_A_TIME = threading.RLock()
"""CPython 3.11 counts the depth of all threads' trees in one place, and raises a SystemError when that goes wrong."""


def parsed_module(source: bytes, filename: str) -> ast.Module:
    """The tree of a module."""
    with _ONE_AT_A_TIME:
        return ast.parse(source, filename=filename)


def parsed_expression(source: str) -> ast.expr:
    """The tree of an expression."""
    with _ONE_AT_A_TIME:
        return ast.parse(source, mode="eval").body
