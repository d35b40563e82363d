"""Region in which HAP, SSP and ASP were measured to be as accurate as BSP, and the factor of epochs of HAP.

Source: `python -m benchmarks.hap_convergence --json`, benchmarks/results/hap_convergence.json; docs/convergence.md has the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HAP_EPOCHS_FACTOR = 1.0
