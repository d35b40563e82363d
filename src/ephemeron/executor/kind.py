"""The kind `tasks`: what a `FunctionExecutor` runs. Tasks of a program of the user live in its client, so nobody else can go on with them;
those of a detached command are made again by giving the command again (`programs`)."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ephemeron import blocking
from ephemeron.blocking import Interrupts
from ephemeron.config.typed import plain
from ephemeron.errors import UserError
from ephemeron.events import RunEnded, to_json
from ephemeron.executor.places import PlaceOptions, address_of
from ephemeron.executor.programs import Program, bring_outputs, delete_leftovers, given_again, last_words, program_of
from ephemeron.functions.jsonl import Journal, begin_again, follow
from ephemeron.functions.local import is_hosted
from ephemeron.prices import Prices
from ephemeron.runs.client_run import ClientRuns, summarized
from ephemeron.runs.folders import RESULT_FILE, RunFolder
from ephemeron.runs.header import RunHeader
from ephemeron.runs.kinds import Following
from ephemeron.runs.origin import command_line
from ephemeron.runs.stop_requests import request_stop, withdraw_stop
from ephemeron.runs.summary import RunResult, RunSummary, write_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksSummary(RunSummary):
    """`result.json` of an executor."""

    tasks: int | None
    """With a result; None, as the other two: its client was killed, and only it knew."""
    failed: int | None
    """In all their tries."""
    cancelled: int | None
    """By the user, or because the run was stopped or has failed."""
    details: Mapping[str, object] = field(default_factory=dict)
    """Of a durable map: its table of results, its slowest and its failed items, and items per second."""


REFUSED = 2
"""Exit status of a command that was refused."""


class _Ended(Exception):
    """The process has ended."""


class TaskRuns(ClientRuns):
    """Runs of executors."""

    summary = TasksSummary
    again = "its client has ended, and with it the tasks that had no result; start it again"
    killable = False  # it is a program of the user
    simulated_go_on = True

    def attach(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        result, program = self.result(folder), program_of(header)
        if result is not None and result.summary.status != "interrupted":
            self.bring_home(folder, header)
            return super().attach(folder, header, following)
        if program is not None:
            return self._go_on(folder, header, program, following)
        if is_hosted(folder.path):
            raise UserError(
                f"the client of run {folder.run_id} has ended; its functions end when they find no task, or now by: ephemeron stop {folder.run_id}"
            )
        if result is None:
            write_summary(folder, interrupted(folder, header))
        raise UserError(f"run {folder.run_id} is not running (interrupted): {self.again}")

    def figures(self, folder: RunFolder, header: RunHeader) -> dict[str, Any]:
        from ephemeron.training.report.map_items import read_map_items

        found = read_map_items(folder)
        return {} if found is None else {"items": plain(found)}

    def _go_on(self, folder: RunFolder, header: RunHeader, program: Program, following: Following) -> RunResult:
        """Gives the command of a run again, and shows its events."""
        (folder.path / RESULT_FILE).unlink(missing_ok=True)
        if header.platform == "simulated" and folder.events.exists() and folder.events.stat().st_size:
            begin_again(folder.events)  # its functions and its queue were in the memory of the process before
        with given_again(folder, program) as process:
            blocking.run(lambda interrupts: self._shown(folder, process, following, interrupts))
        if process.returncode == REFUSED and self.result(folder) is None:  # it would be refused again
            cause = last_words(folder)
            failed = summarized(TasksSummary, folder, header, status="failed", causes=(cause,), tasks=None, failed=None, cancelled=None)
            write_summary(folder, failed)
            Journal(folder.events).append(to_json(RunEnded(t=failed.seconds, status="failed", causes=[cause])))
        result = self.result(folder)
        if result is None:
            raise UserError(f"the command of run {folder.run_id} has ended without a result: {last_words(folder) or process.returncode}")
        self.bring_home(folder, header)
        return result

    def bring_home(self, folder: RunFolder, header: RunHeader) -> None:
        result, program = self.result(folder), program_of(header)
        if result is None or program is None:
            return
        bring_outputs(folder, program)
        if result.summary.status == "finished":
            blocking.run(lambda _: delete_leftovers(folder))

    async def _shown(self, folder: RunFolder, process: subprocess.Popen[bytes], following: Following, interrupts: Interrupts) -> None:
        def check() -> None:
            if process.poll() is not None:
                raise _Ended

        with interrupts.handled(lambda: request_stop(folder, now=False)), contextlib.suppress(_Ended):
            async for event in follow(folder.events, check):
                following.on_event(event)

    def resume(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        if (program := program_of(header)) is not None:
            withdraw_stop(folder)
            return self._go_on(folder, header, program, following)
        raise UserError(
            f"run {folder.run_id} is of kind tasks, which were in the memory of its client: it cannot be resumed; start it again"
        )


def new_header(
    folder: RunFolder,
    name: str,
    options: PlaceOptions,
    *,
    prices: Prices,
    budget_usd: float | None,
    labels: Mapping[str, str],
    payload: Mapping[str, object],
) -> RunHeader:
    """The header of an executor whose first task has come.

    Args:
        folder: of the run.
        name: of the executor.
        options: admitted.
        prices, budget_usd, labels, payload: of the run.
    """
    return RunHeader(
        run_id=folder.run_id,
        kind="tasks",
        name=name,
        platform=options.platform,
        channel=address_of(options, folder.path),
        functions=options.max_workers,
        memory_mb=options.memory_mb,
        lifetime_s=options.lifetime_s,
        prices=prices,
        budget_usd=budget_usd,
        started_at=time.time(),
        ends_with_client=True,
        settings={} if options.settings is None else plain(options.settings),
        labels=labels,
        command=command_line(),
        payload=payload,
    )


def interrupted(folder: RunFolder, header: RunHeader) -> TasksSummary:
    """The summary of an executor whose client was killed, from the events of its functions."""
    return summarized(
        TasksSummary, folder, header, status="interrupted", causes=("its client was killed",), tasks=None, failed=None, cancelled=None
    )
