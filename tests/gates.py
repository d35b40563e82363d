"""Gates: what would be over too early in another process waits there until a test has seen or done what has to happen first."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ephemeron.training.job import Target

T = TypeVar("T")
LIMIT_S = 600.0


@dataclass(frozen=True)
class Gate:
    """A file. Steps of flows wait at it where it is called, models where they are of `model`."""

    file: Path

    def __call__(self, value: T) -> T:
        end = time.monotonic() + LIMIT_S
        while not self.file.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return value

    def open(self, pause_s: float = 0.0) -> None:
        """Lets everything pass; models with a pause before each batch, until it is opened without one."""
        self.file.write_text(str(pause_s))

    def model(self, passes: int, **options: Any) -> Target:
        """`tiny:mlp`, which each process trains no further than so many batches until this gate is open."""
        from ephemeron.training.job import Target

        return Target(target="tiny:gated", options={"gate": str(self.file), "passes": passes, **options})


def holding_results(*arguments: str) -> list[str]:
    """`ephemeron ARGUMENTS`, which gets no further than the first result of its functions: it waits to be interrupted or killed."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import ephemeron.cli.main, gates; gates.main()"
    return [sys.executable, "-c", code, *arguments]


def main() -> None:
    """See `holding_results`."""
    from ephemeron.cli.main import main
    from ephemeron.executor.futures import TaskFuture

    result = TaskFuture.result

    def held(self: TaskFuture, timeout: float | None = None) -> Any:
        result(self, timeout)
        time.sleep(LIMIT_S)
        raise TimeoutError("nobody has ended this command")

    TaskFuture.result = held  # type: ignore[method-assign]
    main()
