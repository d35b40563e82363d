"""Verbs on runs of every kind: `attach`, `resume`, `stop`, `suspend`. They block; below them is asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ephemeron import blocking
from ephemeron.errors import JobError, RunAlreadyDriven, UserError
from ephemeron.events import Event, RunEnded
from ephemeron.functions.jsonl import EventsReplaced, follow
from ephemeron.runs import detached, folders, run_platform
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import RunHeader, open_header
from ephemeron.runs.kinds import Following, RunKind, find_kind
from ephemeron.runs.lock import driving, is_driven
from ephemeron.runs.status import may_be_running, session_end, status_of
from ephemeron.runs.stop_requests import withdraw_stop
from ephemeron.runs.summary import RunResult, copy_results, read_summary

OnEvent = Callable[[Event], None]

STOP_S, _STOPPED_EVERY_S = 600.0, 0.1
"""Seconds in which a run has to stop, and interval at which that is looked for."""
_NEXT_DRIVER_S = 60.0
"""Seconds for which a run that functions drive may have no driver: one has died, and the next has not begun."""
_END_S = 120.0
"""Seconds from the end of a run to its result, at most."""

_log = logging.getLogger(__name__)


def open_run(run_id: str, *, kinds: Collection[str] = ()) -> tuple[RunFolder, RunHeader, RunKind]:
    """A run whose functions may be running, or can be started again.

    Args:
        run_id, kinds: see `folders.find`.

    Raises:
        RunNotFound: no such run.
        UserError: it was simulated by its client.
        JobError: its header is of another release, or its kind is not known.
    """
    folder = folders.find(run_id, kinds=kinds)
    header = open_header(folder)
    kind = find_kind(header.kind)
    if header.platform == "simulated" and not (kind.simulated_go_on or header.detached):
        raise UserError(f"run {folder.run_id} was simulated: its functions started and ended inside one command")
    return folder, header, kind


def attach(
    run_id: str,
    *,
    on_event: OnEvent | None = None,
    out: Path | None = None,
    check: bool = True,
    quiet_interrupt: bool = False,
    loggers: Sequence[Any] = (),
) -> Any:
    """Supervises a running run from this process, or collects the result of one that has ended.

    While another client drives the run, its events are only shown, and an interrupt ends only this call. When that client ends,
    this one takes over.

    Args:
        run_id: name of the run, an unambiguous beginning of it, or `last`.
        on_event: called with every event of the run, old ones first. None: as for `train`.
        out: folder into which result, weights and report are copied.
        check: raise an error if the run fails; False: return its result.
        quiet_interrupt: return the result of a run that an interrupt has stopped, instead of raising `KeyboardInterrupt` when it has
            stopped at a checkpoint.
        loggers: loggers in addition to those that were named at the launch. Objects have to be given again.

    Returns:
        A `RunResult`; of a training run, what `train` returns.

    Raises:
        RunNotFound: there is no such run.
        UserError: the run is not running and has no result. It can be resumed.
        PlatformError: functions that drove it have given it up. It can be resumed.
        RunFailed: the run failed, and `check` is set.
        KeyboardInterrupt: an interrupt has stopped the run at a checkpoint, from which `resume` goes on.
    """
    folder, header, kind = open_run(run_id)
    once = OnceEach(kind.shown(header) if on_event is None else on_event)
    with blocking.handled_interrupts() as interrupts, contextlib.ExitStack() as stack:
        result = None
        if detached.is_remote(header):
            term, was_running = detached.follow(folder, header, once.again)
            if term is not None:
                stack.enter_context(detached.holding(folder, header, term, lambda now: kind.stop(folder, header, now=now)))
            elif was_running:  # it was stopped, or has ended
                kind.bring_home(folder, header)
                result = kind.result(folder)
        result = result or _attached(folder, header, kind, once, loggers)
    copy_results(folder, out)
    return result.returned(check=check, interrupted=interrupts.happened and not quiet_interrupt)


def _attached(folder: RunFolder, header: RunHeader, kind: RunKind, once: OnceEach, loggers: Sequence[Any] = ()) -> RunResult:
    result: RunResult | None = None
    while result is None:
        try:
            with driving(folder):
                result = kind.attach(folder, header, Following(on_event=once.again(), loggers=loggers))
        except RunAlreadyDriven:
            result = blocking.run(lambda _: observe(folder, kind, once.again()))
            if result is None and header.detached:
                _log.warning("no function drives run %s any more: this process does, and an interrupt stops the run", folder.run_id)
        except UserError:
            is_elsewhere = detached.is_remote(header) and not run_platform.is_driven_here(folder.run_id)
            if not header.detached or is_elsewhere or kind.result(folder) is not None:
                raise
            with contextlib.suppress(RunAlreadyDriven), driving(folder):  # what its last driver had in memory is made again
                result = kind.resume(folder, header, Following(on_event=once.again(), loggers=loggers, keep_code=True))
    return result


def detach(run_id: str) -> str:
    """Has functions drive a run that was stopped, has failed or was abandoned, and returns its name when the first of them does.

    Args:
        run_id: name of the run, an unambiguous beginning of it, or `last`.

    Raises:
        RunNotFound: there is no such run.
        UserError: it has finished, cannot be continued or detached, or another client drives it.
        PlatformError: no function drives it.
    """
    folder, header, _ = open_run(run_id)
    detached.check(header)
    if header.ends_with_client:
        raise UserError(f"run {folder.run_id} needs its client: it cannot be continued")
    with driving(folder):
        header = detached.take_back(folder, header)
        _refuse_finished(folder)
        (folder.path / folders.RESULT_FILE).unlink(missing_ok=True)
        withdraw_stop(folder)
    blocking.run(lambda _: detached.hand_over(folder, header, {}))
    return folder.run_id


def _refuse_finished(folder: RunFolder) -> None:
    known = read_summary(folder)
    if known is not None and known.status == "finished":
        raise UserError(f"run {folder.run_id} has finished; there is nothing to resume")


def go_on(run_id: str) -> None:
    """Drives a detached run to its end, for functions (`runs.driver_process`), which have its folder.

    Raises:
        RunNotFound: there is no such run.
        UserError: it cannot be gone on with.
    """
    folder, header, kind = open_run(run_id)
    try:
        _attached(folder, header, kind, OnceEach(lambda event: None))
    except UserError:
        if (known := kind.result(folder)) is None or known.summary.status != session_end(folder.events):
            raise
        _log.info("run %s is over: %s", folder.run_id, known.summary.status)  # its last driver died when it had written the result


def resume(
    run_id: str,
    *,
    on_event: OnEvent | None = None,
    out: Path | None = None,
    check: bool = True,
    quiet_interrupt: bool = False,
    keep_code: bool = False,
    loggers: Sequence[Any] = (),
) -> Any:
    """Continues a stopped or failed run. Of a training run, every rank starts from its newest checkpoint, with the current code of the job.

    The functions of a suspended run go on where they were, with the code that they have.

    Args:
        run_id: name of the run, an unambiguous beginning of it, or `last`.
        on_event: called with every event of the run. None: as for `train`.
        out: folder into which result, weights and report are copied.
        check: raise an error if the run fails; False: return its result.
        quiet_interrupt: return the result of a run that an interrupt has stopped, instead of raising `KeyboardInterrupt` when it has
            stopped at a checkpoint.
        keep_code: use the code of the launch though it has changed since.
        loggers: loggers in addition to those that were named at the launch. Objects have to be given again.

    Returns:
        A `RunResult`; of a training run, what `train` returns.

    Raises:
        RunNotFound: there is no such run.
        JobError: the code has changed, and checkpoints do not fit it.
        UserError: the run has finished, was simulated, cannot be continued, or another client drives it.
        RunFailed: the run failed, and `check` is set.
        KeyboardInterrupt: an interrupt has stopped the run at a checkpoint, from which `resume` goes on.
    """
    folder, header, kind = open_run(run_id)
    shown = kind.shown(header) if on_event is None else on_event
    run_platform.sweep(folders.runs_folder())
    if not detached.is_remote(header) and kind.wake(folder, header):
        return attach(folder.run_id, on_event=shown, out=out, check=check, quiet_interrupt=quiet_interrupt, loggers=loggers)
    with blocking.handled_interrupts() as interrupts, driving(folder):
        header = detached.take_back(folder, header)
        _refuse_finished(folder)
        result: RunResult = kind.resume(folder, header, Following(on_event=shown, loggers=loggers, keep_code=keep_code))
    copy_results(folder, out)
    return result.returned(check=check, interrupted=interrupts.happened and not quiet_interrupt)


def stop(run_id: str, *, now: bool = False, wait: bool = True, wait_s: float = STOP_S) -> str:
    """Stops a run where it can be continued, or kills its functions if `now`.

    Args:
        run_id: name of the run, an unambiguous beginning of it, or `last`.
        now: kill its functions instead of waiting for a checkpoint.
        wait: return when the run has stopped, so that it can be resumed at once; else when it has been asked to.
        wait_s: seconds to wait at most.

    Returns:
        The run's full name.

    Raises:
        RunNotFound: there is no such run.
        UserError: it is not running, or has not stopped in time. It may still stop.
    """
    folder, header, _ = open_run(run_id)
    ask_to_stop(folder, header, now=now)
    if wait:
        _wait_until_stopped(folder, wait_s)
    return folder.run_id


def ask_to_stop(folder: RunFolder, header: RunHeader, *, now: bool) -> None:
    """Asks a run to stop, or kills its functions if `now`.

    Raises:
        UserError: it is not running.
    """
    if detached.is_remote(header) and not run_platform.is_driven_here(folder.run_id):
        return detached.ask_to_stop(folder, header, now=now)
    latest = time.monotonic() + _NEXT_DRIVER_S
    while True:
        try:
            return find_kind(header.kind).stop(folder, header, now=now)
        except UserError:  # it is not driven, but its functions may be running
            between = header.detached and not (folder.path / folders.RESULT_FILE).exists() and detached.has_drivers(folder)
            if not between or time.monotonic() > latest:
                if not blocking.run(lambda _: run_platform.cancel(folder, header)):
                    raise
                return
        time.sleep(_STOPPED_EVERY_S)


def suspend(run_id: str) -> tuple[str, int]:
    """Suspends the functions of a run, which keep their memory. `resume` lets them go on.

    Returns:
        The run's full name, and the number of functions.

    Raises:
        RunNotFound: there is no such run.
        UserError: it is not running, or its kind or its platform cannot suspend functions.
    """
    folder, header, kind = open_run(run_id)
    return folder.run_id, kind.suspend(folder, header)


async def observe(folder: RunFolder, kind: RunKind, on_event: OnEvent) -> RunResult | None:
    """Shows the events of a run that another client drives.

    Returns:
        The result that its driver has written; None: the driver has ended, and the run may continue without one.
    """
    loop = asyncio.get_running_loop()
    ended: RunEnded | None = None
    ended_at = 0.0

    def check() -> None:
        if not is_driven(folder):
            raise _DriverGone
        if ended is not None and loop.time() > ended_at + _END_S:
            raise UserError(f"run {folder.run_id} has ended, but its client writes no result; see: ephemeron runs")

    once, is_gone = OnceEach(on_event), False
    while not is_gone:
        show = once.again()
        try:
            async for event in follow(folder.events, check, once=True):
                show(event)
                ended, ended_at = event if isinstance(event, RunEnded) else None, loop.time()
        except EventsReplaced:
            ended = None
            _log.warning("run %s begins again: what was shown of it is not shown again", folder.run_id)
        except _DriverGone:
            is_gone = True
            _log.info("the client that drove run %s has ended", folder.run_id)
    result = kind.result(folder)
    if ended is None or result is None or result.summary.status != session_end(folder.events):
        return None
    return result


class OnceEach:
    """Passes every event of a stream on once, though the stream is read from its beginning several times."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._passed_on = 0

    def again(self) -> OnEvent:
        """A callback for another reading of the stream."""
        seen = 0

        def on_event(event: Event) -> None:
            nonlocal seen
            seen += 1
            if seen > self._passed_on:
                self._passed_on = seen
                self._on_event(event)

        return on_event


class _DriverGone(Exception):
    """The client that drove the run has ended."""


def _wait_until_stopped(folder: RunFolder, wait_s: float) -> None:
    latest = time.monotonic() + wait_s
    while may_be_running(status := status_of(folder)):
        if status != "running":  # in a cloud, and nobody watches it: its end has to be seen
            attach(folder.run_id, on_event=lambda event: None, check=False, quiet_interrupt=True)
            return
        if time.monotonic() > latest:
            raise JobError(
                f"run {folder.run_id} was asked to stop {wait_s:g} s ago and has not reached a checkpoint yet",
                remedy=f"wait for it: ephemeron attach {folder.run_id}, or kill its functions: ephemeron stop --now {folder.run_id}",
            )
        time.sleep(_STOPPED_EVERY_S)
