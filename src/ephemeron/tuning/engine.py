"""Trials side by side: which begins when, which ends early, and what is told to Optuna.

A trial is a gang of functions: it begins when there are places for all of them, when its predicted cost is within what is left
of the budget, less what running trials are still predicted to cost, and when its predicted time is within the deadline. One
trial waits at most, so that suggestions know as many results as possible. Times are those of the event loop: a simulated study
takes place in virtual time as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from ephemeron.errors import EphemeronError, UserError
from ephemeron.runs import folders
from ephemeron.runs.stop_requests import stop_requested
from ephemeron.tuning import sampling
from ephemeron.tuning.folder import StudyFolder, StudyState, TrialRecord, TrialStatus
from ephemeron.tuning.prediction import TrialPrediction
from ephemeron.tuning.space import Value
from ephemeron.tuning.study_file import StudyFile
from ephemeron.tuning.trial import PREDICTED_S, PREDICTED_USD, REASON, RUN, WORKERS, TrialRun, recorded
from ephemeron.tuning.trials import Trials, Work
from ephemeron.units import human_count
from ephemeron.user_code import line_of

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

LOOK_EVERY_S = 0.5
"""Interval at which requests to end trials are looked for, and `study.json` is renewed."""
_STORED_AT_ONCE = 2
"""Reports of a trial that are stored in such an interval; the others when it ends."""
OnTrial = Callable[[TrialRecord], None]


class Engine:
    """Drives a study to its end.

    Args:
        file: what the study is.
        folder: of the study, whose lock the caller holds.
        study: of Optuna.
        trials: how trials take place.
        places: functions of all trials at once.
        token: part of the names of trials.
        seconds: for which the study was driven before.
        on_trial: called with every trial that has begun or ended.
        on_change: called when anything has changed.
    """

    def __init__(
        self,
        file: StudyFile,
        folder: StudyFolder,
        study: optuna.Study,
        trials: Trials,
        *,
        places: int,
        token: str,
        seconds: float,
        on_trial: OnTrial,
        on_change: Callable[[], None],
    ) -> None:
        self._file, self._folder, self._study, self._how = file, folder, study, trials
        self._places, self._token = places, token
        self._on_trial, self._on_change = on_trial, on_change
        self._before_s, self._began_at = seconds, 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._trials: dict[int, TrialRun] = {}
        """Those that run."""
        self._held: tuple[TrialRun, Work] | None = None
        """A trial that waits."""
        self._over: Literal["", "stopped", "budget", "deadline"] = ""
        self.reason = ""
        """Why it was stopped by itself."""
        self._failures = 0
        """Trials that have failed in a row."""
        self._kills = False
        self._stopped_usd = 0.0
        """Cost of trials that were stopped at a checkpoint."""
        self._ended_usd = sum(recorded(t).cost_usd for t in study.get_trials(deepcopy=False) if t.state.is_finished())

    @property
    def seconds(self) -> float:
        """For which the study was driven so far."""
        return self._before_s + (0.0 if self._loop is None else self._loop.time() - self._began_at)

    @property
    def stopped(self) -> str:
        """What has become of trials that an interrupt has stopped."""
        return self._how.stopped

    @property
    def spent_usd(self) -> float:
        """Cost of all trials so far."""
        return self._how.spent_usd(self._ended_usd + self._stopped_usd + sum(t.cost_usd for t in self._trials.values()))

    @property
    def unfinished(self) -> list[TrialRecord]:
        """Trials that run or wait."""
        running = [t.record("running") for t in self._trials.values()]
        return running if self._held is None else [*running, self._held[0].record("waiting", "waits for places or budget")]

    def interrupt(self) -> None:
        """Stops all trials at a checkpoint; the second time, kills their functions. The study can be resumed."""
        reason = "" if self._over else "the study was interrupted"
        self._over = self._over or "stopped"
        for trial in self._trials.values():
            trial.stop.request(reason)

    def _heed(self) -> None:
        """Stops the study where another process asks for it."""
        asked = stop_requested(folders.RunFolder(self._folder.path))
        if asked and not self._over:
            self.interrupt()
        if asked == "now" and not self._kills:
            self._kills = True
            self.interrupt()

    async def run(self) -> StudyState:
        """Drives the study to its end; returns how it ended. Where this is cancelled, it is stopped as by an interrupt."""
        self._loop, own = asyncio.get_running_loop(), asyncio.current_task()
        assert own is not None
        self._began_at = self._loop.time()
        spec = self._file.spec
        left_usd = None if spec.budget_usd is None else spec.budget_usd - self._how.spent_usd(self._ended_usd)
        if left_usd is not None and left_usd <= 0:
            return self._close("budget")
        tasks: set[asyncio.Task[None]] = set()
        async with self._how.opened(places=self._places, budget_usd=left_usd), contextlib.AsyncExitStack() as stack:
            helpers = {asyncio.create_task(self._deadline())}
            if not self._how.simulated:
                helpers.add(asyncio.create_task(self._look()))
            for helper in helpers:
                stack.callback(helper.cancel)
            for trial in self._study.get_trials(deepcopy=False):
                if not trial.state.is_finished():
                    self._go_on(trial, tasks)
            while True:
                self._begin(tasks)
                if not tasks:
                    break
                try:
                    done, _ = await asyncio.wait(tasks | helpers, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    own.uncancel()
                    self.interrupt()
                    continue
                tasks -= done
                helpers -= done
                for task in done:
                    task.result()
        if self._over == "stopped":
            return "stopped"
        return self._close(self._over or "finished")

    def _close(self, state: StudyState) -> StudyState:
        if self._held is not None:
            trial, self._held = self._held[0], None
            self._tell(trial, "pruned", f"not started: the {state} of the study is reached")
        return state

    # -- beginning ------------------------------------------------------------------------------------------

    def _begin(self, tasks: set[asyncio.Task[None]]) -> None:
        """Begins as many trials as fit."""
        self._heed()
        while not self._over:
            if self._held is None and not self._ask():
                return
            if self._held is None:
                continue  # refused, and another one may be suggested
            trial, work = self._held
            verdict = self._admitted(trial)
            if verdict == "wait":
                return
            self._held = None
            if verdict:
                self._tell(trial, "pruned", f"not started: {verdict}")
            else:
                self._start(trial, tasks, work)

    def _ask(self) -> bool:
        """Suggests a trial, if there is a place and there may be another trial. It is held until it fits."""
        number = len(self._study.get_trials(deepcopy=False))
        if number >= self._file.trials or self._used >= self._places:
            return False
        values, system = sampling.suggest(self._study, self._file.spec, self._file.space)
        self._held = self._prepared(values, system, number)
        return True

    def _prepared(self, values: dict[str, Value], system: Mapping[str, object], number: int) -> tuple[TrialRun, Work] | None:
        """Stores a trial; None: its values contradict each other."""
        attributes: dict[str, object] = {RUN: f"{self._file.spec.name}-{number}-{self._token}"}
        refusal, prepared, predicted = "", None, None
        try:
            prepared = self._how.prepare(values)
            predicted = self._how.predict(prepared, values)
        except UserError as e:
            refusal = " ".join(str(e).split())
        if prepared is not None:
            attributes[WORKERS] = prepared.functions
        if predicted is not None:
            attributes |= {PREDICTED_USD: predicted.cost_usd, PREDICTED_S: predicted.seconds}
        trial = self._run_of(sampling.begin_trial(self._study, self._file.space, values, system, attributes))
        if prepared is None or refusal:
            self._tell(trial, "pruned", f"not started: {refusal}")
            return None
        return trial, self._how.begin(trial, prepared)

    def _run_of(self, trial: FrozenTrial) -> TrialRun:
        attributes = trial.user_attrs
        predicted = TrialPrediction(attributes[PREDICTED_S], attributes[PREDICTED_USD]) if PREDICTED_S in attributes else None
        return TrialRun(
            self._study,
            trial,
            workers=attributes.get(WORKERS, 0),
            predicted=predicted,
            on_change=self._changed,
            reports_often=self._how.reports_often,
            compares_at=partial(sampling.compares_at, self._file.spec) if self._how.reports_often else lambda number: False,
        )

    @property
    def _used(self) -> int:
        return sum(t.workers for t in self._trials.values())

    def _admitted(self, trial: TrialRun) -> str:
        """`""`: it may begin; `wait`: it may later; else why it never will."""
        spec, p = self._file.spec, trial.predicted
        if trial.workers > self._places:
            return f"it needs {trial.workers} functions at once, and all trials together may have {self._places}"
        if spec.deadline_s is not None and p is not None and self.seconds + p.seconds > spec.deadline_s:
            return f"predicted to take {p.seconds:.1f} s, and {max(0.0, spec.deadline_s - self.seconds):.1f} s are left until the deadline"
        if spec.budget_usd is not None and p is not None:
            left = spec.budget_usd - self.spent_usd
            if p.cost_usd > left:
                return f"predicted to cost ${p.cost_usd:.4g}, and ${max(0.0, left):.4g} are left of the budget"
            due = sum(max(0.0, t.predicted.cost_usd - t.cost_usd) for t in self._trials.values() if t.predicted)
            if p.cost_usd > left - due and self._trials:
                return "wait"
        return "wait" if self._used + trial.workers > self._places else ""

    def _start(self, trial: TrialRun, tasks: set[asyncio.Task[None]], work: Work) -> None:
        self._trials[trial.number] = trial
        tasks.add(asyncio.create_task(self._conducted(trial, work)))
        self._on_trial(trial.record("running"))

    def _go_on(self, stored: FrozenTrial, tasks: set[asyncio.Task[None]]) -> None:
        """Goes on with a trial of a client that has ended."""
        trial = self._run_of(stored)
        try:
            prepared = self._how.prepare(stored.params)
        except UserError as e:
            return self._tell(trial, "pruned", f"not started: {e}")
        if (going_on := self._how.go_on(trial)) is not None:
            return self._start(trial, tasks, going_on)
        if trial.ending:
            return self._tell(trial, "pruned", trial.ending)
        work = self._how.begin_again(trial, prepared)
        if not trial.started and self._held is None:
            self._held = trial, work
        else:
            self._start(trial, tasks, work)
        return None

    # -- running --------------------------------------------------------------------------------------------

    async def _conducted(self, trial: TrialRun, work: Work) -> None:
        """Runs a trial to its end, and tells Optuna how it ended."""
        try:
            end = await work()
        except UserError as e:
            return self._not_begun(trial, " ".join(str(e).split()))
        except EphemeronError as e:
            return self._tell(trial, "failed", line_of(e))
        finally:
            del self._trials[trial.number]
        trial.cost_usd, trial.seconds = end.cost_usd, end.seconds
        if end.status != "stopped":
            return self._tell(trial, end.status, end.reason)
        if trial.ending:
            return self._tell(trial, "pruned", trial.ending)
        if self._over == "stopped":
            trial.store_bill()
            self._stopped_usd += trial.cost_usd
            return self._on_trial(trial.record("running", self._how.stopped))
        if self._budget_is_spent(trial.cost_usd):
            self._over = self._over or "budget"
            return self._tell(trial, "pruned", "the budget of the study is spent")
        return self._tell(trial, "pruned", end.reason)

    def _not_begun(self, trial: TrialRun, why: str) -> None:
        if self._over == "stopped" and not trial.ending:
            return
        if not trial.ending and self._budget_is_spent(0.0):
            self._over = self._over or "budget"
        self._tell(trial, "pruned", trial.ending or f"not started: {why}")

    def _budget_is_spent(self, more_usd: float) -> bool:
        budget = self._file.spec.budget_usd
        return budget is not None and self.spent_usd + more_usd >= budget

    def _tell(self, trial: TrialRun, state: TrialStatus, reason: str) -> None:
        """Stores the end of a trial: its cost first, its state last."""
        from optuna.trial import TrialState

        trial.store_bill()
        trial.store(REASON, reason)
        states = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        with sampling.quiet():
            self._study.tell(trial.number, trial.value if state == "finished" else None, state=states[state], skip_if_finished=True)
        self._ended_usd += trial.cost_usd
        self._on_trial(trial.record(state, reason))
        self._on_change()
        if state == "failed" or trial.started:
            self._count(state, reason)

    def _count(self, state: TrialStatus, reason: str) -> None:
        """Stops the study where too many trials have failed in a row: others would, too."""
        self._failures = self._failures + 1 if state == "failed" else 0
        most = self._file.max_failures
        if most is not None and self._failures >= most and not self._over:
            self.reason = f"{human_count(most, 'trial')} in a row {'has' if most == 1 else 'have'} failed, the last one: {reason}"
            self.interrupt()

    def _changed(self, trial: TrialRun) -> None:
        if self._folder.end_is_requested(trial.number):
            trial.end("ended by request")
        self._heed()
        if self._how.simulated:
            self._on_change()

    # -- limits ---------------------------------------------------------------------------------------------

    async def _deadline(self) -> None:
        limit = self._file.spec.deadline_s
        if limit is None:
            return
        await asyncio.sleep(max(0.0, limit - self.seconds))
        self._over = self._over or "deadline"
        for trial in list(self._trials.values()):
            trial.end("the deadline of the study is reached")

    async def _look(self) -> None:
        """Looks for requests, and renews the status."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._heed()
            for trial in list(self._trials.values()):
                trial.store_reports(_STORED_AT_ONCE)
                if self._folder.end_is_requested(trial.number):
                    trial.end("ended by request")
            self._on_change()
