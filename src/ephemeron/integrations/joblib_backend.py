"""A back end of joblib on functions: the calls of a `Parallel` are tasks of a `FunctionExecutor`. `ephemeron.joblib` is its public interface.

joblib cuts calls into batches, has two of them a worker under way, and submits the next one when one is done. A batch is a task, whose
arguments are the functions and arguments of its calls: those that are large and in many batches, such as X and y of a search, are stored
once (`executor.arguments`). How many calls a batch has follows the time that functions have computed, so it does not depend on how far
away they are. What a call raises ends the `Parallel`, as that exception, with the failure of the task as its cause.

Functions belong to a `parallel_config`, and are kept from one `Parallel` in it to the next. They end by themselves when they idle, and with
the context; at once after an error or an interruption.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import statistics
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import joblib
from joblib.parallel import FallbackToBackend, ParallelBackendBase, SequentialBackend, get_active_backend

from ephemeron.config.typed import near
from ephemeron.errors import BudgetReached, JobError, TaskFailed
from ephemeron.executor.batching import BATCH_S
from ephemeron.executor.executor import FunctionExecutor
from ephemeron.executor.shipping import name_of
from ephemeron.integrations.joblib_calls import Shape, nested_backend, run_calls

_log = logging.getLogger(__name__)

_OPTIONS = frozenset(inspect.signature(FunctionExecutor).parameters) - {"max_workers"}
_OF_PROCESSES = frozenset({"context", "max_nbytes", "mmap_mode", "temp_folder", "verbose"})
"""What joblib tells every back end, for those that start processes and map files."""


class EphemeronBackend(ParallelBackendBase):  # type: ignore[misc]
    """Runs the calls of a `Parallel` on functions.

    Args:
        nesting_level, inner_max_num_threads: see joblib; the second is refused: a function has as many threads as vCPUs.
        pool: executor to use, which is not shut down.
        options: of `FunctionExecutor`, where there is no `pool`.

    Raises:
        JobError: an option is not known, or stands beside `pool`.
    """

    supports_retrieve_callback = True
    default_n_jobs = -1

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        *,
        pool: FunctionExecutor | None = None,
        **options: Any,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        _check(options, pool)
        self._options, self._given, self._pool = options, pool, pool
        self._lock = threading.Lock()
        self._own: FunctionExecutor | None = None
        self._made: dict[str, Any] = {}
        """Options of `_own`."""
        self._wanted: dict[str, Any] | None = None
        """Those of the latest call; None: it was aborted."""
        self._ending: weakref.finalize[..., Any] | None = None
        self._usually: int | None = None
        self._spent_usd, self._tasks = 0.0, 0
        """By executors that were shut down."""
        self._nested: Any = None
        self._open: set[Future[Any]] = set()
        self._batches = BatchSize()
        self._compute_s = 0.0
        """Of the latest batch."""
        self._callbacks = ThreadPoolExecutor(1, "ephemeron-joblib")

    @classmethod
    @contextmanager
    def opened(cls, n_jobs: int, options: Mapping[str, Any]) -> Iterator[FunctionExecutor]:
        """See `ephemeron.joblib.functions`."""
        _check(options, None)
        if n_jobs < 1 and n_jobs != -1:
            raise JobError(f"n_jobs = {n_jobs} is no number of functions", remedy="-1: as many as FunctionExecutor starts by default")
        with _executor(options, max(0, n_jobs) or None) as pool, joblib.parallel_config(cls(pool=pool), n_jobs=-1):
            yield pool

    # -- what joblib calls --------------------------------------------------------------------------------------

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Batches that are under way at once are twice as many. It is 1, for which joblib makes the calls here, only where 1 was asked for."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        return 1 if n_jobs == 1 else max(2, self._functions_of(n_jobs))

    def configure(self, n_jobs: int | None = 1, parallel: Any = None, prefer: Any = None, require: Any = None, **options: Any) -> int:
        """Opens an executor, unless there is one of these options.

        Raises:
            EphemeronError: an option is refused, or the budget of earlier calls is spent.
        """
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        own = {name: value for name, value in options.items() if name not in _OF_PROCESSES}
        pool = own.pop("pool", self._given)
        _check({**self._options, **own}, pool)
        self._pool = pool
        number = self.effective_n_jobs(n_jobs)
        self._wanted = {**self._options, **own, "max_workers": self._functions_of(n_jobs)}
        self._nested = nested_backend(self._functions().vcpus, (self.nesting_level or 0) + 1)
        return number

    def submit(self, func: Any, callback: Callable[[Any], Any] | None = None) -> Future[Any]:
        """Hands a batch to the executor. An error is one of the future: joblib submits batches in callbacks, too, where no error is seen."""
        shapes: list[Shape] = [(len(args), tuple(named)) for _, args, named in func.items]
        values = [value for function, args, named in func.items for value in (function, *args, *named.values())]
        future: Future[Any]
        is_virtual = False
        try:
            executor = self._functions()
            is_virtual = executor.platform == "simulated"
            future = executor.submit(run_calls, self._nested, shapes, *values)
        except Exception as e:  # noqa: BLE001 - handed on
            future = Future()
            future.set_exception(_named(e, func.items[0][0]))
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if callback is not None:
            # In virtual time here, so that the calls that follow are in the same round.
            future.add_done_callback(callback if is_virtual else partial(self._tell, callback))
        return future

    apply_async = submit
    """Its name before joblib 1.5."""

    def retrieve_result_callback(self, out: Any) -> Any:
        """Results of a batch, or what a call has raised."""
        self._compute_s = getattr(out, "compute_s", 0.0)
        try:
            return out.result()
        except TaskFailed as failed:
            raised, failed.__cause__ = failed.__cause__, None
            if raised is None:
                raise
            raise raised from failed
        except CancelledError:
            raise RuntimeError("the executor of these calls was shut down, or an error of other calls has ended its functions") from None

    def compute_batch_size(self) -> int:
        """Calls of the next batches."""
        return self._batches.size

    def batch_completed(self, batch_size: int, duration: float) -> None:
        """Notes how long calls have computed, whatever else took time."""
        self._batches.completed(batch_size, self._compute_s)

    def get_nested_backend(self) -> tuple[Any, None]:
        """Back end of a `Parallel` in a call."""
        return self._nested, None

    def terminate(self) -> None:
        """The end of a `Parallel`. Functions are kept for the next one."""
        self._batches = BatchSize()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancels what has no result; functions of one's own executor end at once."""
        with self._lock:
            ended = self._given_up()
            if not ensure_ready:
                self._wanted = None
        for future in list(self._open):
            future.cancel()
        self._end(ended)

    # -- the executor -------------------------------------------------------------------------------------------

    def _functions_of(self, n_jobs: int | None) -> int:
        """Functions for a number of jobs, which counts down from all of them where it is negative."""
        if n_jobs is not None and n_jobs > 0:
            return n_jobs if self._pool is None else min(n_jobs, self._pool.max_workers)
        every = self._every_function()
        return every if n_jobs is None else max(1, every + 1 + n_jobs)

    def _every_function(self) -> int:
        """All functions: of the pool, of the `parallel_config`, or as many as there are by default."""
        if self._pool is not None:
            return self._pool.max_workers
        active, told = get_active_backend()
        if active is self and told is not None and told > 0:
            return int(told)
        if self._usually is None:
            with _executor(self._options, None) as executor:
                self._usually = executor.max_workers
        return self._usually

    def _functions(self) -> FunctionExecutor:
        """The executor, with the options of the latest call."""
        if self._pool is not None:
            return self._pool
        while True:
            with self._lock:
                if self._wanted is None:
                    raise CancelledError
                if self._own is None:
                    self._own, self._made = self._made_for(self._wanted), self._wanted
                    self._ending = weakref.finalize(self, self._own.shutdown, wait=False, cancel_futures=True)
                if self._made == self._wanted:
                    return self._own
                ended = self._given_up()
            self._end(ended, cancel=False)

    def _made_for(self, wanted: Mapping[str, Any]) -> FunctionExecutor:
        options, budget = dict(wanted), wanted.get("budget_usd")
        if budget is not None and self._spent_usd:
            if self._spent_usd >= budget:
                raise BudgetReached(self._spent_usd, budget, done=self._tasks, of=self._tasks)
            options["budget_usd"] = budget - self._spent_usd
        return _executor(options, options.pop("max_workers"))

    def _given_up(self) -> FunctionExecutor | None:
        """The executor of one's own, which has no task any more."""
        own, self._own = self._own, None
        if self._ending is not None:
            self._ending.detach()
        return own

    def _end(self, executor: FunctionExecutor | None, *, cancel: bool = True) -> None:
        """Waits for its end without the lock, which its callbacks may wait for."""
        if executor is not None:
            executor.shutdown(cancel_futures=cancel)
            bill = executor.bill()
            self._spent_usd += bill.cost_usd
            self._tasks += bill.tasks

    def _tell(self, callback: Callable[[Any], Any], future: Future[Any]) -> None:
        """Calls joblib, which takes the next calls from the user's iterable and submits them, in a thread in which that may take long."""
        with contextlib.suppress(RuntimeError):  # the program ends
            self._callbacks.submit(_called, callback, future)


class BatchSize:
    """Number of calls in a batch: as many as compute for `BATCH_S`, by the latest batches; it doubles at most, and shrinks at once. Pure."""

    def __init__(self) -> None:
        self.size = 1
        self._each_s: deque[float] = deque(maxlen=9)

    def completed(self, calls: int, compute_s: float) -> None:
        """A batch of so many calls has computed so long."""
        self._each_s.append(compute_s / calls)
        most = 2 * self.size if calls >= self.size else self.size
        self.size = max(1, min(most, round(BATCH_S / max(statistics.median(self._each_s), 1e-6))))


def _check(options: Mapping[str, Any], pool: object) -> None:
    for name, value in options.items():
        if name == "max_workers":
            raise JobError(f"max_workers = {value!r} is no option of joblib", remedy="n_jobs says how many functions run at once")
        if name not in _OPTIONS:
            raise JobError(f"{name} = {value!r} is no option of functions", remedy=near(name, {*_OPTIONS, "n_jobs", "pool"}))
    if pool is not None and not isinstance(pool, FunctionExecutor):
        raise JobError(f"pool = {pool!r} is no FunctionExecutor")
    if pool is not None and options:
        raise JobError(f"{next(iter(options))} and pool are both given", remedy="an executor has its options from where it is made")


def _called(callback: Callable[[Any], Any], future: Future[Any]) -> None:
    try:
        callback(future)
    except BaseException:  # noqa: BLE001 - whatever an iterable raises
        _log.exception("the iterable of a Parallel, or joblib, has failed")


def _executor(options: Mapping[str, Any], functions: int | None) -> FunctionExecutor:
    try:
        return FunctionExecutor(**{"name": "joblib", **options}, max_workers=functions)
    except JobError as e:
        raise JobError(re.sub(r"^max_workers\b", "n_jobs", e.problem), remedy=e.remedy) from None


def _named(error: Exception, function: Any) -> Exception:
    """An error that names the user's function where it names ours."""
    if not isinstance(error, JobError):
        return error
    return JobError(error.problem.replace(name_of(run_calls), name_of(function)), remedy=error.remedy)
