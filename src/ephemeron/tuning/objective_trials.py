"""Trials of an objective: each is a task on the functions of the study, which go on while its client is gone.

Trials are named by number and parameters, so a client that goes on finds what functions have computed meanwhile: a trial that has a
result is not computed again, one that runs is waited for. What a trial reports are events of the study, and are in its result, too, in
which none is missing. A function that dies is known by the trial that it ran: so often as `retries` says, the trial begins again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import math
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ephemeron.errors import EphemeronError, PlatformError, TaskFailed
from ephemeron.events import Ended, Event, TaskBegan, TaskReported
from ephemeron.executor.futures import TaskFuture
from ephemeron.executor.places import PlaceOptions, opened
from ephemeron.executor.session import Session, SessionTerms, Submission
from ephemeron.executor.shipping import Shipment
from ephemeron.functions.jsonl import unfinished
from ephemeron.functions.shipped_code import dumps
from ephemeron.functions.shipped_tasks import WITHIN
from ephemeron.functions.tasks.model import TaskSpec
from ephemeron.prices import Prices
from ephemeron.runs.folder_copies import save_now
from ephemeron.runs.folders import last_t
from ephemeron.runs.header import RunHeader
from ephemeron.tuning.folder import StudyFolder
from ephemeron.tuning.objective_call import CallForm, TrialCall, TrialOutcome, run_trial
from ephemeron.tuning.space import Values
from ephemeron.tuning.study_file import StudyFile
from ephemeron.tuning.trial import METRICS, RUN, TRACEBACK, TrialRun
from ephemeron.tuning.trials import PreparedTrial, TrialEnd, Trials, TrialsBroken, Work
from ephemeron.units import human_count
from ephemeron.user_code import line_of

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Interval at which the budget is looked at."""
_ENDS: Mapping[str, str] = {
    "out_of_memory": "was killed{times} above the {memory_mb:,} MB that it has; use a larger memory_mb",
    "timed_out": "was killed{times} at its time limit",
    "lost": "died{times}",
}
"""What has happened to the function of a trial, by the status of its end."""


class _Running:
    """A trial that runs or waits for a function."""

    def __init__(self, trial: TrialRun, future: TaskFuture) -> None:
        self.trial, self.future = trial, future
        self.failure = ""
        """Why it is given up; empty: it is not."""
        self._began: float | None = None
        self._before_s = 0.0
        self._deaths = 0

    def began(self, t: float) -> None:
        """A function runs it."""
        self._began = t
        self.trial.begin()

    def seconds(self, t: float, last_s: float = 0.0) -> float:
        """For which functions have run it.

        Args:
            t: now.
            last_s: that the last of them has taken, if that is known.
        """
        return self._before_s + (last_s or (0.0 if self._began is None else max(0.0, t - self._began)))

    def lost(self, t: float, why: str, *, retries: int) -> None:
        """Its function has died."""
        self._before_s, self._began = self.seconds(t), None
        self._deaths += 1
        if self._deaths > retries and not self.failure:
            times = f" {human_count(self._deaths, 'time')}" if self._deaths > 1 else ""
            self.failure = f"its function {why.format(times=times)}"
            self.future.cancel()

    def stop(self) -> None:
        """Ends it."""
        self.future.cancel()

    def left(self) -> None:
        """Its function was ended by its client."""
        self._began = None


class ObjectiveTrials(Trials):
    """Tasks of the objective of a study.

    Args:
        file, folder, header: of the study.
        shipment, form: of its function.
        options: admitted.
        secrets: of the channel.
        prices: of functions and channel.
        spent_usd: before.
    """

    def __init__(
        self,
        file: StudyFile,
        folder: StudyFolder,
        header: RunHeader,
        *,
        shipment: Shipment,
        form: CallForm,
        options: PlaceOptions,
        secrets: dict[str, str],
        prices: Prices,
        spent_usd: float,
    ) -> None:
        assert file.spec.objective is not None
        self.simulated = options.platform == "simulated"
        self._spec, self._budget_usd = file.spec.objective, file.spec.budget_usd
        self._metric, self._folder, self._header = file.spec.metric, folder, header
        self._shipment, self._form, self._options = shipment, form, options
        self._secrets, self._prices, self._before_usd = secrets, prices, spent_usd
        events = folder.run.events
        self._before_s = last_t(folder.run) if events.exists() else 0.0
        self._session: Session | None = None
        self._error: Exception | None = None
        """Why no trial can take place any more."""
        self._of: dict[str, _Running] = {}
        """By task."""
        self._on: dict[int, str] = {}
        """By rank, the task that its function has begun last."""

    reports_often = True
    stopped = "stopped: it begins anew"

    def prepare(self, values: Values) -> PreparedTrial:
        return PreparedTrial(functions=1, what=dict(values))

    def t(self, seconds: float) -> float:
        return self._before_s if self._session is None else self._session.t

    def spent_usd(self, of_trials: float) -> float:
        now = 0.0 if self._session is None else self._session.bill().cost_usd
        if self.simulated:  # earlier sessions are in no event of this one
            return self._before_usd + now
        return max(self._before_usd, now)  # which has all events of the run, once they are read

    @asynccontextmanager
    async def opened(self, *, places: int, budget_usd: float | None) -> AsyncIterator[None]:
        run = self._folder.run
        session = self._session = Session(
            run.run_id,
            self._options,
            key=run.signing_key(),
            prices=self._prices,
            labels=self._header.labels,
            on_event=self._feed,
            terms=SessionTerms(
                goes_on=True, tells=False, one_at_a_time=True, more_losses=places * (self._spec.retries + 1), before_s=self._before_s
            ),
        )
        session.header = self._header
        left = [] if self.simulated else unfinished(run.events)[0]
        async with opened(self._options, run=run.run_id, folder=run.path, secrets=self._secrets) as place:
            live = asyncio.ensure_future(session.live(place, running=left))
            live.add_done_callback(self._ended)
            watching = asyncio.ensure_future(self._watch())
            try:
                yield
            finally:
                watching.cancel()
                for one in list(self._of.values()):
                    one.future.cancel()
                session.close()
                session.wake()
                await asyncio.wait([live])
        self._check()
        shutil.rmtree(run.objects, ignore_errors=True)  # of which nothing is needed again

    def _ended(self, live: asyncio.Future[None]) -> None:
        """The session has ended: trials that are left have no result."""
        error = None if live.cancelled() else live.exception()
        if error is not None:
            made = (
                error if isinstance(error, EphemeronError) else PlatformError(f"the functions of the study have failed: {line_of(error)}")
            )
            self._break(TrialsBroken(made))

    def _break(self, error: Exception) -> None:
        self._error = self._error or error
        for one in list(self._of.values()):
            one.future.cancel()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _watch(self) -> None:
        """Notes what trials that run have taken, and ends them when the budget is spent."""
        while True:
            await asyncio.sleep(_LOOK_S)
            is_spent = self._budget_usd is not None and self.spent_usd(0.0) >= self._budget_usd
            for one in list(self._of.values()):
                self._note(one, self.t(0.0))
                if is_spent:
                    one.future.cancel()

    def _note(self, one: _Running, t: float) -> None:
        one.trial.seconds = one.seconds(t)
        one.trial.cost_usd = self._usd(one.trial.seconds)

    def begin(self, trial: TrialRun, prepared: PreparedTrial) -> Work:
        text = json.dumps([trial.number, prepared.what], sort_keys=True)
        task = f"trial-{trial.number}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
        (self._folder.trials / str(trial.number)).mkdir(parents=True, exist_ok=True)
        one = self._of[task] = _Running(trial, TaskFuture(task, name=f"trial {trial.number}", on_cancel=self._cancelled))
        return lambda: self._run(one, self._submission(one, prepared.what))

    def go_on(self, trial: TrialRun) -> Work | None:
        if self.simulated or not trial.ending:
            return None  # it is the same as another beginning
        return self.begin(trial, self.prepare(trial.values))  # it was being ended, and a function may still run it

    def begin_again(self, trial: TrialRun, prepared: PreparedTrial) -> Work:
        return self.begin(trial, prepared)

    def _submission(self, one: _Running, values: Mapping[str, Any]) -> Submission:
        call = TrialCall(number=one.trial.number, params=values, form=self._form, metric=self._metric, timeout_s=self._spec.timeout_s)
        spec = TaskSpec(
            id=one.future.task,
            function=f"{WITHIN} {run_trial.__module__}:{run_trial.__qualname__} {self._shipment.reference}",
            payload=dumps(((call,), {}), what="a trial"),
            timeout_s=self._spec.timeout_s,
            max_tries=self._spec.retries + 1,
        )
        return Submission(spec=spec, future=one.future, objects=self._shipment.objects, is_watched=True)

    async def _run(self, one: _Running, submission: Submission) -> TrialEnd:
        trial, session = one.trial, self._session
        assert session is not None
        trial.run = one.future.task
        trial.store(RUN, trial.run)
        await save_now()  # before a function can have it
        self._check()
        if trial.ending:
            trial.stop.kill(trial.ending)
        try:
            session.add([submission])
            session.wake()
            with trial.stop.handled(lambda reason="": one.stop()):
                ended = asyncio.wrap_future(one.future)
                ended.add_done_callback(lambda future: future.cancelled() or future.exception())  # seen: it is looked at below
                await asyncio.wait([ended])
        finally:
            del self._of[one.future.task]
        self._check()
        if one.future.cancelled():
            end = self._end(one, "failed" if one.failure else "stopped", one.failure)
            return dataclasses.replace(end, reason=end.reason or "it was cancelled")
        error = one.future.exception()
        if isinstance(error, TaskFailed):
            self._raised(trial, error.traceback)
            return self._end(one, "failed", " ".join(str(error).split()))
        assert error is None
        return self._finished(one, one.future.result())

    def _finished(self, one: _Running, outcome: TrialOutcome) -> TrialEnd:
        trial = one.trial
        if not trial.started:  # its events are still on their way
            trial.begin()
        for number, (step, value) in enumerate(outcome.reports, 1):
            trial.report(step, value, number=number, decides=False)
        trial.metrics = outcome.metrics
        if trial.metrics:
            trial.store(METRICS, dict(trial.metrics))
        if outcome.error:
            self._raised(trial, outcome.traceback)
            return self._end(one, "failed", outcome.error)
        if outcome.is_pruned:
            return self._end(one, "pruned", "pruned by the objective")
        trial.value = outcome.value
        return self._end(one, "finished")

    @staticmethod
    def _raised(trial: TrialRun, traceback: str) -> None:
        if traceback:
            trial.traceback = traceback
            trial.store(TRACEBACK, traceback)

    def _end(self, one: _Running, status: Any, reason: str = "") -> TrialEnd:
        assert self._session is not None
        seconds = one.seconds(self._session.t, one.future.compute_s)
        return TrialEnd(status=status, seconds=seconds, cost_usd=self._usd(seconds), reason=reason)

    def _usd(self, seconds: float) -> float:
        return self._prices.functions_usd(seconds * self._options.memory_mb / 1024, 0)

    def _cancelled(self, future: TaskFuture) -> None:
        session = self._session
        if session is not None:
            session.cancel(future.task)
            session.wake()

    def _feed(self, event: Event) -> None:
        """Takes an event of the study's functions in. What that raises, such as a full disk, ends the study."""
        try:
            self._take_in(event)
        except Exception as e:  # noqa: BLE001 - raised by `_check`
            self._break(e)

    def _take_in(self, event: Event) -> None:
        if isinstance(event, TaskBegan):
            self._on[event.rank] = event.task
            if (one := self._of.get(event.task)) is not None:
                one.began(event.t)
        elif isinstance(event, TaskReported) and (one := self._of.get(event.task)) is not None:
            self._note(one, event.t)
            one.trial.report(event.step, math.nan if event.value is None else event.value, number=event.number)
        elif isinstance(event, Ended):
            one = self._of.get(self._on.pop(event.rank, ""))
            if one is None:
                return
            if event.status == "cancelled":
                one.left()
            elif event.status != "ok":
                said = (event.error.strip().splitlines() or [event.status])[0].replace("{", "{{").replace("}", "}}")
                why = _ENDS.get(event.status, f"failed{{times}}: {said}").replace("{memory_mb:,}", f"{self._options.memory_mb:,}")
                _log.info("the function of trial %d has ended: %s", one.trial.number, event.status)
                one.lost(event.t, why, retries=self._spec.retries)
