"""Conditions for a promotion, as a recipe writes them:

    heldout_loss < production - 0.01        better than the model in production by a margin
    heldout_loss <= base                    not worse than the model that training started from
    arc_easy.acc >= 0.3                     at least a number

Left a measure of the trained model; right a number, or `production` or `base` for the same measure of that model, with
a number added, subtracted or multiplied. There is no production model before the first promotion: conditions against
it hold then.
"""

import ast
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from mca_lib.errors import ConfigError

_COMPARISONS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
_SIGNS = {operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">="}
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_MODELS = ("production", "base")

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Condition:
    """One line of a gate."""

    text: str
    metric: str
    compare: object
    bound: ast.expr

    @property
    def needs(self) -> set[str]:
        """`production`, `base`: the models that it compares with."""
        return {node.id for node in ast.walk(self.bound) if isinstance(node, ast.Name)}

    def failure(self, trained: Metrics, others: Mapping[str, Metrics | None]) -> str | None:
        """Why it does not hold, in one line; None when it holds.

        Args:
            trained: measures of the trained model.
            others: those of `base` and `production`; None: there is no such model yet.

        Raises ConfigError for a measure that was not taken.
        """
        if any(others.get(name) is None for name in self.needs):
            return None
        value = _measure(trained, self.metric, self.text, "the trained model")
        bound = self._value(self.bound, others)
        if self.compare(value, bound):  # false for NaN, on either side
            return None
        return f"{self.text}: {self.metric} is {value:.6g}, and it must be {_SIGNS[self.compare]} {bound:.6g}"

    def _value(self, node: ast.expr, others: Mapping[str, Metrics | None]) -> float:
        if isinstance(node, ast.Constant):
            return float(node.value)
        if isinstance(node, ast.Name):
            return _measure(others[node.id], self.metric, self.text, node.id)
        if isinstance(node, ast.UnaryOp):
            return -self._value(node.operand, others)
        assert isinstance(node, ast.BinOp), node
        return _OPERATIONS[type(node.op)](self._value(node.left, others), self._value(node.right, others))


def parse_condition(text: str) -> Condition:
    """Raises ConfigError for anything but MEASURE < BOUND, with <=, > or >= as well."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        node = None
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or type(node.ops[0]) not in _COMPARISONS:
        raise ConfigError(f"gate: {text!r} is no condition; write for instance `heldout_loss < production - 0.01`")
    metric = _dotted(node.left)
    if metric is None or metric in _MODELS:
        raise ConfigError(f"gate: {text!r}: a measure goes on the left, as in `heldout_loss < production`")
    _check_bound(node.comparators[0], text)
    return Condition(text.strip(), metric, _COMPARISONS[type(node.ops[0])], node.comparators[0])


def _check_bound(node: ast.expr, text: str) -> None:
    number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    if number or (isinstance(node, ast.Name) and node.id in _MODELS):
        return None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _check_bound(node.operand, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        _check_bound(node.left, text)
        return _check_bound(node.right, text)
    raise ConfigError(
        f"gate: {text!r}: {ast.unparse(node)!r} cannot stand on the right; numbers, production and base can, with + - *"
    )


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := _dotted(node.value)) is not None:
        return f"{left}.{node.attr}"
    return None


def _measure(metrics: Metrics, name: str, text: str, of: str) -> float:
    if name not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        raise ConfigError(f"gate: {text!r}: {name} was not measured of {of}; measured: {known}")
    return metrics[name]
