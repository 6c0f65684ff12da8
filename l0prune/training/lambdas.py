"""λ, the price of a parameter: an expression in N, one for all axes or one per axis by glob.

0.1/N                     the paper's setting; N is the number of training examples
log(N)/(2*N)              the same as bic; aic is 1/N
convs.*=10/N, 0.1/N       axes named convs.… at 10/N, all others at 0.1/N
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from l0prune.errors import UsageError
from l0prune.plan.globs import by_rules
from l0prune.plan.numbers import check_number

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "log": math.log,
    "sqrt": math.sqrt,
    "exp": math.exp,
}
_HELP = "λ is a number ≥ 0 or an expression in N, such as 0.1/N, log(N)/(2*N), aic or bic"


@dataclass(frozen=True, slots=True)
class Lambda:
    """λ of every axis, in units of the loss per parameter.

    Attributes:
        default: λ of the axes that no rule names.
        rules: globs over axis names, each with its λ; the first that matches counts.
    """

    default: float
    rules: tuple[tuple[str, float], ...] = ()

    @staticmethod
    def of(value: LambdaLike, n: int | None = None) -> Lambda:
        """Parse λ from a number, a text, or a mapping from globs to either.

        Axes that no rule names have λ = 0, unless a default is given: their parameters are free.
        """
        if isinstance(value, Lambda):
            return value
        if isinstance(value, str):
            return _parse(value, n)
        if isinstance(value, Mapping):
            return Lambda(0.0, tuple((glob, _value(v, n)) for glob, v in value.items()))
        return Lambda(_value(value, n))

    def for_axes(self, names: Sequence[str]) -> tuple[float, ...]:
        """λ of each axis; UsageError where a rule matches none of the names."""
        return tuple(by_rules(names, self.rules, self.default, "λ"))


LambdaLike = float | str | Lambda | Mapping[str, float | str]


@lru_cache(maxsize=256)
def _parse(text: str, n: int | None) -> Lambda:
    defaults: list[float] = []
    rules: list[tuple[str, float]] = []
    for part in text.split(","):
        glob, is_rule, expression = part.rpartition("=")
        if is_rule:
            rules.append((glob.strip(), _value(expression, n)))
        else:
            defaults.append(_value(expression, n))
    if len(defaults) > 1:
        raise UsageError(f"λ = {text!r} gives {len(defaults)} values for all axes; give one")
    if any(not glob for glob, _ in rules):
        raise UsageError(f"λ = {text!r} has nothing in front of '='; write AXIS=EXPRESSION")
    return Lambda(defaults[0] if defaults else 0.0, tuple(rules))


@lru_cache(maxsize=256)  # a training loop asks for the same number at every step
def _value(expression: float | str, n: int | None) -> float:
    """Evaluate and check one λ."""
    text = str(expression).strip()
    try:
        tree = ast.parse(text, mode="eval").body
        value = _evaluate(tree, text, n)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise UsageError(f"cannot read λ = {text!r}; {_HELP}") from error
    except (ArithmeticError, ValueError, TypeError) as error:
        raise UsageError(f"λ = {text!r} has no value ({error}); {_HELP}") from error
    if isinstance(value, complex) or not math.isfinite(value):
        raise UsageError(f"λ = {text!r} is {value}; {_HELP}")
    if value < 0:
        raise UsageError(
            f"λ = {text!r} is negative ({value:g}), which would pay for parameters; "
            "use a value ≥ 0 (0 switches the penalty off)"
        )
    check_number(f"λ = {text!r}", value)
    return value


def _evaluate(node: ast.expr, text: str, n: int | None) -> float:
    """Return the value of an arithmetic expression; any other syntax is a UsageError."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id="N"):
            return _n(text, n)
        case ast.Name(id="aic"):
            return 1 / _n(text, n)
        case ast.Name(id="bic"):
            return math.log(_n(text, n)) / (2 * _n(text, n))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, text, n)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, text, n)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_evaluate(left, text, n), _evaluate(right, text, n))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_evaluate(argument, text, n))
    raise UsageError(f"cannot read {ast.unparse(node)!r} in λ = {text!r}; {_HELP}")


def _n(text: str, n: int | None) -> float:
    if n is None:
        raise UsageError(
            f"λ = {text!r} needs N, the number of training examples, which is not known here: give "
            "it (n=… here, or Task(…, size=N) where the data cannot say it), λ as a plain number, "
            "or a budget"
        )
    if n < 1:
        raise UsageError(f"λ = {text!r} needs N ≥ 1, not {n}")
    return float(n)
