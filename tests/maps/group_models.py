"""Functions of users for tests of groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


class Line:
    """A line through points."""

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = weights

    def predict(self, x: Any) -> Any:
        """Of column `t`."""
        return self.weights[0] + self.weights[1] * np.asarray(x["t"])


def line(group: Any) -> Line:
    """Least squares."""
    t = np.asarray(group["t"], float)
    weights, *_ = np.linalg.lstsq(np.column_stack([np.ones(len(t)), t]), np.asarray(group["y"], float), rcond=None)
    return Line(weights)


def line_and_metrics(group: Any, key: dict[str, Any]) -> tuple[Line, dict[str, Any]]:
    """A line, and what was given."""
    return line(group), {"rows": len(group["t"]), "mean": float(np.mean(group["y"])), "key": [repr(value) for value in key.values()]}


def not_of_bad(group: Any, key: dict[str, Any]) -> Line:
    """Fails for one store."""
    if key["store"] == "bad":
        raise ValueError("there is no line of the bad")
    return line(group)


def kind(group: Any) -> tuple[str, dict[str, Any]]:
    """What a group is."""
    names = list(getattr(group, "column_names", None) or (group if isinstance(group, dict) else group.columns))
    return "model", {"type": f"{type(group).__module__.partition('.')[0]}.{type(group).__name__}", "names": names}


def of_arrays(group: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The same, annotated."""
    return kind(group)


def types(group: Any) -> tuple[str, dict[str, Any]]:
    """Types of a pandas frame."""
    return "model", {name: str(dtype) for name, dtype in group.dtypes.items()}


def streamed(parts: Iterator[Any]) -> tuple[float, dict[str, Any]]:
    """A sum over parts."""
    total, sizes = 0.0, []
    for part in parts:
        total += float(np.sum(part["y"]))
        sizes.append(len(part["y"]))
    return total, {"parts": len(sizes), "rows": sum(sizes)}


def random(group: Any, rng: Any) -> float:
    """A number of the group alone."""
    return float(rng.uniform())


def nothing(group: Any) -> None:
    """Forgets to return."""


def a_generator(group: Any) -> Any:
    """What cannot be pickled."""
    return (n for n in range(3))


def a_function(group: Any) -> Any:
    """A model that no module has."""
    mean = float(np.mean(group["y"]))
    return lambda x: np.full(len(x), mean)


def large(group: Any) -> np.ndarray:
    """A model of 80 kB."""
    return np.full(10_000, float(np.mean(group["y"])))


def has_torch(group: Any) -> tuple[str, dict[str, Any]]:
    """Whether PyTorch is imported in the function."""
    return "model", {"torch": "torch" in sys.modules}


def without_group() -> int:
    """Takes nothing."""
    return 1


def with_more(group: Any, horizon: int) -> int:
    """Takes what it is not given."""
    return horizon


def sum_of(model: np.ndarray, group: Any) -> dict[str, Any]:
    """Columns by name, of a model that has no `predict`."""
    return {"level": np.full(len(group), model[0]), "name": ["x"] * len(group)}


def too_few(model: Any, group: Any) -> list[float]:
    """One prediction."""
    return [1.0]


def fails_for_some(model: Line, group: Any, key: dict[str, Any]) -> Any:
    """Fails for one store."""
    if key["store"] == "b":
        raise ValueError("no forecast of b")
    return model.predict(group)
