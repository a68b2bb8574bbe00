"""A calculator for text: numbers, + - * / // % **, parentheses and a few functions, and nothing else of Python."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from schemas.syntax import parsed_expression

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": round, "min": min, "max": max, "sqrt": math.sqrt, "floor": math.floor, "ceil": math.ceil,
    "log": math.log, "exp": math.exp, "sin": math.sin, "cos": math.cos, "tan": math.tan, "gcd": math.gcd,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}
_LONGEST = 1000
"""Characters of an expression."""
_MOST_BITS = 4096
"""Of a whole number on the way."""


class CalculatorError(Exception):
    """What is wrong with an expression, for the one who wrote it."""


def calculate(expression: str) -> str:
    """The value of ``expression`` as text.

    Raises:
        CalculatorError: it is no expression, or has no value.
    """
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/")
    if len(text) > _LONGEST:
        raise CalculatorError(f"the expression is longer than {_LONGEST} characters")
    try:
        value = _value(parsed_expression(text))
    except CalculatorError:
        raise
    except (SyntaxError, RecursionError, MemoryError):
        raise CalculatorError("that is no expression") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise CalculatorError(str(error)) from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATORS:
            return _bounded(_OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in _FUNCTIONS:
            raise CalculatorError(f"there is no function {node.func.id!r}; there are {', '.join(sorted(_FUNCTIONS))}")
        return _bounded(_FUNCTIONS[node.func.id](*map(_value, node.args)))
    raise CalculatorError("only numbers, + - * / // % **, parentheses and functions can be used")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if base.bit_length() * exponent > _MOST_BITS:
            raise CalculatorError("the number is too large")
        return base**exponent
    return _bounded(float(base) ** float(exponent))


def _bounded(value: Any) -> Any:
    if isinstance(value, complex):
        raise CalculatorError("the value is not real")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise CalculatorError("the number is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise CalculatorError("the number is too large")
    return value
