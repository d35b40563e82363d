"""Speed of device kinds: table 1 of Cloudless-Training, as factors of its first row.

The table measures ResNet-18 on CIFAR-10. `rated` is its column TN: the floating-point rate of the device over that of two IceLake cores.
`measured` is its column IN: the same ratio of iteration times. Section 2.2 takes P from TN, and calls it an estimate; the ratio IN/TN, the
last column, is 0.71 for Cascade Lake and 0.83 for Skylake, so TN alone misjudges CPUs by up to 29 %. Table 5 follows the measured
ratio: it states 2:3 for Cascade Lake and Skylake, where IN gives 0.68 and TN 0.80.

A CPU row has two cores; a GPU row is one GPU. `power` has one unit for both: one IceLake core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ephemeron.config.typed import near
from ephemeron.errors import JobError

PowerSource = Literal["measured", "rated"]
"""`measured`: from iteration times (column IN of table 1); `rated`: from floating-point rates (column TN)."""
_CORES = 2
"""Of the table's first row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFactor:
    """A row of table 1."""

    kind: str
    """Name in `regions.toml`."""
    title: str
    """Name in the table."""
    cores: int
    """Cores of the row: CPU cores, or CUDA cores of one GPU."""
    tflops: float
    rated: float
    """TN: floating-point rate over that of the first row."""
    iteration_s: float
    measured: float
    """IN: iteration time of the first row over that of this one."""
    gpu: bool = False

    @property
    def ratio(self) -> float:
        """IN over TN: measured speed for each unit of rated speed."""
        return self.measured / self.rated

    def power(self, source: PowerSource = "measured") -> float:
        """Speed of one core of a CPU, or of one GPU, over that of one IceLake core."""
        factor = self.rated if source == "rated" else self.measured
        return factor * _CORES if self.gpu else factor


TABLE_1 = (
    DeviceFactor(kind="icelake", title="Intel Xeon IceLake", cores=2, tflops=0.096, rated=1.0, iteration_s=3.697, measured=1.0),
    DeviceFactor(
        kind="cascade-lake", title="Intel Xeon Cascade Lake", cores=2, tflops=0.090, rated=0.938, iteration_s=5.549, measured=0.666
    ),
    DeviceFactor(kind="skylake", title="Intel Xeon Skylake", cores=2, tflops=0.112, rated=1.167, iteration_s=3.800, measured=0.973),
    DeviceFactor(kind="t4", title="Nvidia T4", cores=2560, tflops=5.554, rated=57.854, iteration_s=0.062, measured=59.629, gpu=True),
    DeviceFactor(kind="v100", title="Nvidia V100", cores=5120, tflops=13.345, rated=139.010, iteration_s=0.024, measured=154.042, gpu=True),
)
KINDS = {factor.kind: factor for factor in TABLE_1}
"""Rows by kind."""


def power_of(kind: str, *, source: PowerSource = "measured", where: str = "device") -> float:
    """Power of one core or GPU of a kind of table 1.

    Args:
        kind: such as `cascade-lake`.
        source: column of the table.
        where: place of the kind, for the message.

    Raises:
        JobError: the table has no such kind.
    """
    if kind not in KINDS:
        raise JobError(
            f"{where}: device kind {kind!r} has no power, and none is built in",
            remedy=f"give power, relative to the other devices; {near(kind, KINDS, what='built-in kinds')}",
        )
    return KINDS[kind].power(source)
