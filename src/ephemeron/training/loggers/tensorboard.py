"""TensorBoard event files, through PyTorch's writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ephemeron.training.loggers.logger import LoggedRun, Logger, Param, Status


class TensorBoardLogger(Logger):
    """Scalars, parameters (for the HPARAMS page), the report's picture, and the plan and the bill as text.

    Args:
        folder: in which a folder for the run is made; None: `tensorboard` in the run's own folder.
    """

    name = "tensorboard"

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._step = 0

    def start(self, run: LoggedRun) -> str:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard" if self._folder is None else self._folder / run.run_id
        place = str(folder) if run.logged_as is None else run.logged_as
        self._writer = SummaryWriter(place)
        return place

    def log_params(self, params: Mapping[str, Param]) -> None:
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(dict(params), {"evaluation/loss": 0.0}):
            self._writer.file_writer.add_summary(summary)
        escaped = {name: str(value).replace("|", "\\|").replace("\n", " ") for name, value in params.items()}
        table = "\n".join(f"| {name} | {value} |" for name, value in escaped.items())
        self._writer.add_text("parameters", f"| name | value |\n|---|---|\n{table}")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._step = max(self._step, step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_artifact(self, path: Path) -> None:
        if path.suffix == ".png":
            import numpy as np
            from PIL import Image

            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            self._writer.add_image(path.stem, pixels, self._step, dataformats="HWC")
        elif path.suffix == ".json":
            text = "".join(f"    {line}\n" for line in path.read_text().splitlines())  # Markdown shows it as it is
            self._writer.add_text(path.stem, text, self._step)

    def save(self) -> None:
        self._writer.flush()

    def finish(self, status: Status) -> None:
        self._writer.close()
