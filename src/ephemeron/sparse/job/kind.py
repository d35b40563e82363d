"""The kind `sparse`: a job with a table `[sparse]`, whose parameters are in the shards of a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.sparse.job.driving import drive
from ephemeron.sparse.job.preparing import prepare
from ephemeron.training.driver.kind import TrainingRuns

if TYPE_CHECKING:
    from ephemeron.runs.predictions import Prediction
    from ephemeron.training.driver.launching.launch import LaunchRequest


class SparseRuns(TrainingRuns):
    """Runs of sparse jobs. `training` and `tuning` prepare, drive, predict and load them through this."""

    prepare = staticmethod(prepare)
    drive = staticmethod(drive)

    def predict(self, request: LaunchRequest, on_progress: Callable[[str], None]) -> Prediction:
        """See `predictor.predict_run`."""
        from ephemeron.sparse.job.predictor import predict_run

        return predict_run(request, on_progress)

    def make_predictor(self, *arguments: Any, **options: Any) -> Any:
        """See `predictor.sparse_predictor`."""
        from ephemeron.sparse.job.predictor import sparse_predictor

        return sparse_predictor(*arguments, **options)

    def load_model(self, run: str | Path) -> Any:
        """See `trained.trained_model`."""
        from ephemeron.sparse.job.evaluation import trained_model

        return trained_model(run)
