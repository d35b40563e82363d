"""Decisions on functions, for tests."""

from ephemeron import EpochMeasurements, Resize, Schedule


class Growing(Schedule):
    """One function more after each epoch, up to a number."""

    def __init__(self, most: int = 4) -> None:
        self.most = most

    def decide(self, measured: EpochMeasurements) -> Resize | None:
        assert measured.epoch_s > 0
        assert measured.spent_usd > 0
        assert measured.loss > 0
        return Resize(workers=measured.workers + 1) if measured.workers < self.most else None


def once(measured: EpochMeasurements, workers: int) -> Resize | None:
    """A single change after the second epoch."""
    return Resize(workers=workers) if measured.epoch == 2 else None


def wrong(measured: EpochMeasurements) -> int:
    return 3
