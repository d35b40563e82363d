"""A forecast for each product of each store: level, trend and days of the week by least squares. Functions import this module and NumPy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

HELD_OUT = 14
"""Last days of a group, on which its forecast is tried before it is fitted to all of them."""


class Forecast:
    """Weights of a level, a trend and seven days of the week."""

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = weights

    def predict(self, group: dict[str, np.ndarray]) -> np.ndarray:
        """Sales of each day, none of them negative."""
        return np.maximum(0.0, features(group["day"]) @ self.weights)


def features(day: np.ndarray) -> np.ndarray:
    """Level and trend, and the day of the week, [days, 9]."""
    return np.column_stack([np.ones(len(day)), day / 365.0, np.eye(7)[day % 7]])


def least_squares(day: np.ndarray, sold: np.ndarray) -> Forecast:
    """The weights of smallest error; a small penalty keeps the days of the week apart from the level."""
    a = features(day)
    return Forecast(np.linalg.solve(a.T @ a + 0.1 * np.eye(a.shape[1]), a.T @ sold))


def fit(group: dict[str, np.ndarray], key: dict[str, Any]) -> tuple[Forecast, dict[str, float]]:
    """A forecast, and what it and last week's sales were wrong by on days that it had not seen, in units sold."""
    day, sold = group["day"], group["sold"]
    if len(day) < 2 * HELD_OUT:
        raise ValueError(f"{key['sku']} of {key['store']} was sold for {len(day)} days: too few for a forecast")
    tried = least_squares(day[:-HELD_OUT], sold[:-HELD_OUT]).predict({"day": day[-HELD_OUT:]})
    last_week = np.resize(sold[-HELD_OUT - 7 : -HELD_OUT], HELD_OUT)
    seen = sold[-HELD_OUT:]
    return least_squares(day, sold), {
        "mean": float(sold.mean()),
        "error": float(np.abs(tried - seen).mean()),
        "error_of_last_week": float(np.abs(last_week - seen).mean()),
    }
