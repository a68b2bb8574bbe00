"""Built-in sources of generated rows: deterministic, without repeats."""

import itertools
import math
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

from schemas.config import nearest
from schemas.errors import ConfigError, NotFoundError
from schemas.loading import code_version, is_user_code, load_object

Generator = Callable[..., Iterator[dict[str, Any]]]

_ENUMERABLE = 4_000_000
"""Spaces up to this size are permuted as a whole."""


def arithmetic(
    seed: int,
    *,
    operators: str = "+-*",
    low: int = 0,
    high: int = 99,
    terms: int = 2,
    negative: bool = True,
    held_out: bool = False,
    held_out_share: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Expressions over small integers: rows with ``expression`` (``"12 + 7"``) and ``answer`` (``"19"``).

    Args:
        operators: some of ``+-*``.
        low: least operand, 0 or more.
        high: largest operand.
        terms: operands of an expression, 2 to 6.
        negative: whether a result below zero may occur.
        held_out_share: share of all expressions, chosen by hash and not by seed, that is set apart.
        held_out: yield only those set apart, instead of only the others. So a training and a test set share none.
    """
    if not operators or set(operators) - set("+-*") or not 0 <= low <= high or not 2 <= terms <= 6:
        raise ConfigError(
            f"arithmetic: operators {operators!r}, operands {low} to {high}, {terms} terms cannot be used",
            hint="operators are some of '+-*', operands go from 0 up, terms from 2 to 6",
        )
    if not 0 <= held_out_share < 1 or (held_out and held_out_share == 0):
        raise ConfigError("arithmetic: held_out_share must be at least 0, less than 1, and not 0 with held_out")
    width = high - low + 1
    choices = [width] + [len(operators), width] * (terms - 1)
    cut = held_out_share * 2**64
    for index in _shuffled(math.prod(choices), seed):
        digits = []
        for size in choices:
            index, digit = divmod(index, size)
            digits.append(digit)
        numbers = [low + digit for digit in digits[::2]]
        signs = [operators[digit] for digit in digits[1::2]]
        expression = str(numbers[0]) + "".join(f" {s} {n}" for s, n in zip(signs, numbers[1:], strict=True))
        value = _value(numbers, signs)
        apart = int.from_bytes(blake2b(expression.encode(), digest_size=8).digest(), "big") < cut
        if apart == held_out and (negative or value >= 0):
            yield {"expression": expression, "answer": str(value)}


def games(
    seed: int, *, environment: str, params: dict[str, Any] | None = None, held_out: bool = False
) -> Iterator[dict[str, Any]]:
    """Games of a text environment for the agent ``environment``: rows with ``environment``, ``seed`` and ``params``.

    Args:
        environment: its name, such as ``frozen_lake``.
        params: its parameters, the same for all. None: its defaults.
        held_out: yield games with odd seeds instead of those with even ones. So a training and a test set share none.
    """
    for number in itertools.count():
        drawn = blake2b(f"{seed} {number}".encode(), digest_size=6).digest()
        yield {
            "environment": environment,
            "seed": int.from_bytes(drawn, "big") * 2 + held_out,
            "params": params or {},
        }


GENERATORS: dict[str, Generator] = {"arithmetic": arithmetic, "games": games}


def generator_named(name: str) -> Generator:
    """The built-in or user's generator of that name."""
    if is_user_code(name):
        function: Generator = load_object(name, "generator")
        return function
    if name not in GENERATORS:
        raise NotFoundError(f"unknown generator {name!r}", hint=nearest(name, list(GENERATORS)))
    return GENERATORS[name]


def generator_version(name: str) -> str:
    """Version of a generator's code, for the key; the stage's own version covers the built-in ones."""
    generator_named(name)
    return code_version(name, "generator") if is_user_code(name) else "built-in"


def _value(numbers: list[int], signs: list[str]) -> int:
    sums = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            sums[-1] *= number
        else:
            sums.append(number if sign == "+" else -number)
    return sum(sums)


def _shuffled(size: int, seed: int) -> Iterator[int]:
    """Every number below ``size`` once, in an order that depends on ``seed`` only."""
    import numpy as np

    random = np.random.Generator(np.random.Philox(key=seed))
    if size <= _ENUMERABLE:
        yield from random.permutation(size).tolist()
        return
    seen: set[int] = set()
    while len(seen) < size // 2:
        for index in random.integers(size, size=1024).tolist():
            if index not in seen:
                seen.add(index)
                yield index
