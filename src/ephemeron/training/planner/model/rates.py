"""Transfer times as a function of size: four fitted forms, with coefficients for each measured memory quota.

How long an object of s MB (1e6 bytes) takes one way:

    {"p_mb_s", "t_per_mb"}                                     s / (p·(1 − exp(−t·s))), FasDL equations 3-5 and 3-6
    {"latency_s", "mb_s"}                                      latency + s / bandwidth
    {"latency_s", "s_per_mb", "exponent"}                      latency + c·s^γ, which predicts AWS Lambda with S3 better
    {"latency_s", "s_per_mb", "knee_mb", "s_per_mb_beyond"}    latency + two rates, one beyond a size: multipart

`transfer_curves` interpolates between measured quotas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ephemeron.config.typed import NonNegative, Positive

Array: TypeAlias = np.ndarray[Any, Any]
Direction: TypeAlias = Literal["up", "down"]
Coefficient: TypeAlias = Array | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturating:
    """Throughput p·(1 − exp(−t·s)): FasDL, equations 3-5 and 3-6."""

    p_mb_s: Positive
    t_per_mb: Positive

    @staticmethod
    def curve(size_mb: Array, p_mb_s: Coefficient, t_per_mb: Coefficient) -> Array:
        """Seconds by size, for coefficients that broadcast against the sizes."""
        s = np.maximum(size_mb, 1e-9)
        return np.asarray(s / (p_mb_s * -np.expm1(-t_per_mb * s)))

    def seconds(self, size_mb: Array | float) -> Array:
        return self.curve(np.asarray(size_mb, dtype=float), self.p_mb_s, self.t_per_mb)

    @property
    def bandwidth_mb_s(self) -> float:
        """Throughput of many objects at once, MB/s."""
        return self.p_mb_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """Latency, then a constant rate."""

    latency_s: NonNegative
    mb_s: Positive

    @staticmethod
    def curve(size_mb: Array, latency_s: Coefficient, mb_s: Coefficient) -> Array:
        """Seconds by size, for coefficients that broadcast against the sizes."""
        return np.asarray(latency_s + size_mb / mb_s)

    def seconds(self, size_mb: Array | float) -> Array:
        return self.curve(np.asarray(size_mb, dtype=float), self.latency_s, self.mb_s)

    @property
    def bandwidth_mb_s(self) -> float:
        return self.mb_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Latency, then time that grows as a power of the size: some stores serve large objects over more connections."""

    latency_s: NonNegative
    s_per_mb: Positive
    exponent: Positive

    @staticmethod
    def curve(size_mb: Array, latency_s: Coefficient, s_per_mb: Coefficient, exponent: Coefficient) -> Array:
        """Seconds by size, for coefficients that broadcast against the sizes."""
        return np.asarray(latency_s + s_per_mb * size_mb**exponent)

    def seconds(self, size_mb: Array | float) -> Array:
        return self.curve(np.asarray(size_mb, dtype=float), self.latency_s, self.s_per_mb, self.exponent)

    @property
    def bandwidth_mb_s(self) -> float:
        """Throughput at 50 MB, the largest size in the published measurements."""
        return 50.0 / float(self.s_per_mb * 50.0**self.exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """Latency, then one rate up to a size and another beyond it: clients cut large objects into parts, sent at once."""

    latency_s: NonNegative
    s_per_mb: Positive
    knee_mb: Positive
    s_per_mb_beyond: NonNegative
    """0: beyond the knee, larger objects take no longer."""

    @staticmethod
    def curve(size_mb: Array, latency_s: Coefficient, s_per_mb: Coefficient, knee_mb: Coefficient, s_per_mb_beyond: Coefficient) -> Array:
        """Seconds by size, for coefficients that broadcast against the sizes."""
        before = np.minimum(size_mb, knee_mb)
        return np.asarray(latency_s + s_per_mb * before + s_per_mb_beyond * (size_mb - before))

    def seconds(self, size_mb: Array | float) -> Array:
        s = np.asarray(size_mb, dtype=float)
        return self.curve(s, self.latency_s, self.s_per_mb, self.knee_mb, self.s_per_mb_beyond)

    @property
    def bandwidth_mb_s(self) -> float:
        """Throughput at 50 MB, as with `Power`."""
        return 50.0 / float(self.seconds(50.0) - self.latency_s)


Rate: TypeAlias = Saturating | Affine | Power | Knee


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Both directions at one memory quota."""

    memory_mb: Positive
    up: Rate
    down: Rate
