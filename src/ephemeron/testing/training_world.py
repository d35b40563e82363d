"""A platform on which small jobs are trained and disturbed: what every platform's training tests have in common.

    world = TrainingWorld(platform="aws", job=JOB, memory_mb=704, settings=settings, channels={"cache": address}, folder=tmp)
    result, events = world.go(faults=("kill:rank=0,iteration=7,phase=upload",))
    world.check_same(result)          # the weights of the run in which nothing happened

Runs are stored in the home folder that EPHEMERON_HOME names at that moment; the undisturbed run is made once, on first
use, in a home of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import psutil

from ephemeron.config import own_processes
from ephemeron.events import Event, Progress
from ephemeron.runs import detached
from ephemeron.runs.folders import RunFolder, runs_folder
from ephemeron.runs.summary import read_summary
from ephemeron.runs.verbs import attach
from ephemeron.training.driver import Result, configure, train
from ephemeron.training.driver.api import launch
from ephemeron.training.job import Job, parse_fault

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER_TIMEOUT_S = 120.0
"""Silence after which peers replace a rank, where nothing is lost that only peers miss: deaths are seen by the client. Longer than a
function is late on a machine that is busy with other things, where a needless replacement changes what the run does."""
LEAST_LIFETIME_S, STARTS = 5.0, 4
"""Lifetimes that a run is to pass are at least so long, and so many times as long as functions take to start now."""
LIFETIMES, SILENT = 1.25, 0.3
"""Lifetimes that the iterations of such a run take together, and that a peer may be silent: longer than it takes to start."""
_DRIVEN_S, _LOOK_S = 1.0, 0.1
"""For which a function has driven when it is killed, and interval at which it is looked for."""
_LIFETIME_S = 40.0
"""Of a function that drives; half of it is more than what one takes to begin."""
SHAPE: Mapping[str, Any] = {"workers": 3, "aggregators": 2, "batch_size": 48, "checkpoint_every": 3}


@dataclass(kw_only=True)
class TrainingWorld:
    """One platform, with its services running."""

    platform: str
    job: Job
    folder: Path
    """Home folder of the undisturbed run."""
    memory_mb: int | None = None
    """Quota of a function; None: the platform's own."""
    settings: Any = None
    """Settings of a cloud."""
    channels: Mapping[str, str | None] = field(default_factory=lambda: {"own": None})
    """Addresses by name; the first is used where a test names none. None: the platform's default."""
    shape: Mapping[str, Any] = field(default_factory=lambda: dict(SHAPE))
    slow_relays: bool = False
    """Nothing is ever warm, so passing lifetimes takes minutes: only with EPHEMERON_FULL_MATRIX=1."""

    def go(
        self,
        *,
        faults: Sequence[str] = (),
        on_event: Callable[[Event], None] = lambda event: None,
        channel: str = "",
        job: Job | None = None,
        peer_timeout_s: float | None = None,
        **how: Any,
    ) -> tuple[Result, list[Any]]:
        """Trains to the end.

        Args:
            faults: in their text form.
            on_event: sees everything that happens.
            channel: one of the names in `channels`, or an address.
            job: another one.
            peer_timeout_s: see `train`; None: `PEER_TIMEOUT_S`.
            how: of the configuration, instead of the world's own.

        Returns:
            The result, and all events in order.
        """
        events: list[Any] = []

        def see(event: Event) -> None:
            events.append(event)
            on_event(event)

        wanted = job or self.job
        c = configure(wanted, **{**self.configured(channel), **how})
        result = train(
            wanted,
            c,
            faults=[parse_fault(f) for f in faults],
            on_event=see,
            cloud=self.settings,
            peer_timeout_s=PEER_TIMEOUT_S if peer_timeout_s is None else peer_timeout_s,
            check=False,
        )
        return result, events

    def go_detached(self, *, kills: int, faults: Sequence[str] = (), peer_timeout_s: float | None = None, **how: Any) -> Result:
        """Trains to the end on functions that functions drive, of which some are killed from outside while they do.

        Args:
            kills: functions to kill, each when it has driven for a moment.
            faults, peer_timeout_s, how: see `go`.
        """
        c = configure(self.job, **{**self.configured(), **how})
        # Signs of life are not paid for here; and one of the two passes its time limit.
        with patch.object(detached, "CLOUD_BEAT_S", detached.BEAT_S), patch.object(detached, "LIFETIME_S", _LIFETIME_S):
            run = launch(
                self.job,
                c,
                faults=[parse_fault(f) for f in faults],
                cloud=self.settings,
                peer_timeout_s=PEER_TIMEOUT_S if peer_timeout_s is None else peer_timeout_s,
            )
        killed: set[int] = set()
        while len(killed) < kills and (found := driver_function(run, besides=killed)) is not None:
            time.sleep(_DRIVEN_S)
            killed.add(found.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                found.kill()
        assert len(killed) == kills, "the run was over before"
        result = attach(run, check=False)
        detached.await_ends(result.folder)
        return result  # type: ignore[no-any-return]

    def configured(self, channel: str = "") -> dict[str, Any]:
        """Arguments of `configure` for this world."""
        address = self.channels.get(channel, channel) if channel else next(iter(self.channels.values()))
        return {**self.shape, "platform": self.platform, "memory_mb": self.memory_mb, "channel": address}

    @cached_property
    def undisturbed(self) -> tuple[Result, list[Any]]:
        """The run in which nothing happens."""
        with _home(self.folder / "undisturbed"):
            return self.go()

    @staticmethod
    def past_lifetimes(events: list[Any]) -> dict[str, Any]:
        """Arguments of `go` for a run that passes the lifetime of every function, however fast the machine is.

        Args:
            events: of a run just before, with as many iterations.
        """
        began: dict[int, float] = {e.rank: e.t for e in reversed(of(events, Progress))}
        lifetime_s = max(LEAST_LIFETIME_S, STARTS * max(began.values()))
        each_s = LIFETIMES * lifetime_s / (1 + max(e.iteration for e in of(events, Progress)))
        return {
            "function_timeout_s": round(lifetime_s, 3),
            "peer_timeout_s": SILENT * lifetime_s,
            "faults": (f"delay:rank=1,factor=1,seconds={each_s:.3f}",),
        }

    def check_same(self, result: Result) -> None:
        """Whether a run has ended as the undisturbed one did, bit for bit."""
        assert result.summary.status == "finished", result.causes
        wanted = self.undisturbed[0].summary.weights_sha256
        assert result.summary.weights_sha256 == wanted, "the weights differ from those of the undisturbed run"


def of(events: list[Any], kind: type) -> list[Any]:
    """Those of a kind, in order."""
    return [event for event in events if isinstance(event, kind)]


def driver_function(run: str, *, besides: Collection[int] = (), within_s: float = 120.0) -> psutil.Process | None:
    """The process of the function that drives a run now; None: there is none any more.

    Args:
        run: name of the run.
        besides: processes that are not meant.
        within_s: longest wait for one.
    """
    latest = time.monotonic() + within_s
    while time.monotonic() < latest and read_summary(RunFolder(runs_folder() / run)) is None:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if own_processes.module_of("driver") in words and f'"{run}"' in words[-1] and '"drive"' in words[-1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    function = process.parent()
                    if function is not None and function.pid not in besides and function.pid != 1:
                        return function
        time.sleep(_LOOK_S)
    return None


@contextmanager
def _home(folder: Path) -> Iterator[None]:
    before = os.environ.get("EPHEMERON_HOME")
    os.environ["EPHEMERON_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["EPHEMERON_HOME"]
        else:
            os.environ["EPHEMERON_HOME"] = before
