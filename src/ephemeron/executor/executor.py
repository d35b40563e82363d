"""`FunctionExecutor`: functions of any platform behind the interface of `concurrent.futures`.

    with ephemeron.FunctionExecutor(platform="local") as pool:
        print(list(pool.map(lambda x: x * x, range(100))))
        future = pool.submit(pow, 2, 10)
        print(future.result(), pool.bill())

Tasks go through a queue in the channel (`functions.tasks`), which gives each of them one result, however many functions die. A
function that is tried again has run before, maybe to its end: what it does outside has to bear that.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from ephemeron.config.code_bundle import Selection
from ephemeron.errors import JobError
from ephemeron.events import Traffic
from ephemeron.executor.arguments import ArgumentPickler, SharedArguments
from ephemeron.executor.drivers import driver_of
from ephemeron.executor.environment import python_of
from ephemeron.executor.futures import TaskFuture
from ephemeron.executor.graphs import Graph
from ephemeron.executor.places import PlaceOptions, address_of, admitted
from ephemeron.executor.programs import PROGRAM, DurableMap, TaskNames, opened_again, present_launch, shipped, taken_over
from ephemeron.executor.progress import ProgressBar
from ephemeron.executor.session import Bill, Session, Submission
from ephemeron.executor.shipping import Shipment, Shipper, TaskCode, find_code_of, name_of
from ephemeron.executor.trees import grow
from ephemeron.functions.base import Limits
from ephemeron.functions.deployed_packages import check_extra, check_modules
from ephemeron.functions.shipped_code import digest_of
from ephemeron.functions.shipped_tasks import ShippedGraph, code_keys, graph_key
from ephemeron.functions.tasks.model import TaskResult, TaskSpec
from ephemeron.functions.world import Simulation
from ephemeron.prices import Prices, load_prices
from ephemeron.runs import folders
from ephemeron.runs.folders import PROGRESS_FILE, RunFolder
from ephemeron.runs.labels import check_labels
from ephemeron.runs.lock import hold
from ephemeron.runs.stop_requests import stop_requested, withdraw_stop
from ephemeron.units import human_count

_log = logging.getLogger(__name__)

_TOLD_EVERY_S = 1.0
"""Interval at which other clients see how far it is."""


class FunctionExecutor(concurrent.futures.Executor):
    """Runs Python functions on a platform. Use it as a context manager: at the end it waits for its tasks and ends its functions.

    Args:
        platform: `local`, `simulated`, `aws`, `openfaas`, `ray`, `lithops`.
        name: of the run, with which its id begins: `ephemeron runs` lists it.
        memory_mb: memory of a function, and with it its CPU share. None: one vCPU on this machine, the function's own on a cloud.
        max_workers: functions at once. None: the cores of this machine; elsewhere 100, or as many as may run.
        channel: address of the store for code, arguments and results; clouds need one that they reach, such as `s3://bucket/prefix`. None: a
            folder of this machine.
        function_timeout_s: time limit of a function, which runs many tasks. None: the platform's.
        timeout_s: time limit of one try of a task. None: the time that its function has left.
        retries: further tries of a task that raised, or whose function died.
        budget_usd: cost at list prices at which everything that has no result is cancelled.
        requirements: file with packages that functions have beside those that are installed here: of pip, `uv.lock`, `pylock.toml` or
            `pyproject.toml`. On this machine they are installed once, into an environment of their own; a deployment has to have them.
        code: folders to send along, beside those of the modules that define the functions.
        code_include, code_exclude: patterns of file names or paths in these folders. Sources, text and small files are sent; tables, arrays
            and archives if a source names them, or `code_include` does (`config.code_bundle`).
        progress: show a progress bar on standard error. None: if that is a terminal.
        prices_file: price file instead of the built-in prices.
        settings: location of the function on a cloud, such as `AwsSettings`.
        simulation: latencies and starts of platform `simulated`; its tasks run when a result is asked for, in virtual time.
        preload: modules that local functions import before their first task, such as `torch`.
        autoscaling_factor: functions for each task that is ready or running, up to `max_workers` (NumPyWren, section 4). Below 1, fewer
            functions wait for tasks at the ends of a graph, and the work takes longer.
        idle_timeout_s: time after which a function that finds no task ends.
        labels: names and values by which the run is found; see `runs.labels`.
        durable: of `ephemeron.maps`, whose tasks another process can go on with.

    Raises:
        UserError: an option is refused. Nothing was started.
    """

    def __init__(
        self,
        platform: str = "local",
        *,
        name: str = "map",
        memory_mb: int | None = None,
        max_workers: int | None = None,
        channel: str | None = None,
        function_timeout_s: float | None = None,
        timeout_s: float | None = None,
        retries: int = 2,
        budget_usd: float | None = None,
        requirements: str | Path | None = None,
        code: Sequence[str | Path] = (),
        code_include: Sequence[str] = (),
        code_exclude: Sequence[str] = (),
        progress: bool | None = None,
        prices_file: str | Path | None = None,
        settings: Any = None,
        simulation: Simulation | None = None,
        preload: Sequence[str] = (),
        autoscaling_factor: float = 1.0,
        idle_timeout_s: float = 10.0,
        labels: Mapping[str, str] | None = None,
        durable: DurableMap | None = None,
    ) -> None:
        labels = check_labels(labels)
        for option, value in (("timeout_s", timeout_s), ("budget_usd", budget_usd)):
            if value is not None and value <= 0:
                raise JobError(f"{option} = {value} is not above 0", remedy="leave it out for none")
        if not 0 < autoscaling_factor <= 1000:
            raise JobError(f"autoscaling_factor = {autoscaling_factor} is not above 0", remedy="1: a function for each task")
        if not 0 <= idle_timeout_s < 1e6:
            raise JobError(f"idle_timeout_s = {idle_timeout_s} is negative", remedy="0: a function ends when it finds no task")
        if retries < 0:
            raise JobError(f"retries = {retries} is negative", remedy="0: each task is tried once")
        channel = "folder" if channel is None else channel
        if not isinstance(channel, str):
            raise JobError(f"channel = {channel!r} is no address", remedy="give a text such as 's3://bucket/prefix', or None")
        for folder in code:
            if not Path(folder).is_dir():
                raise JobError(f"code = {str(folder)!r} is no folder")
        for option, patterns in (("code_include", code_include), ("code_exclude", code_exclude)):
            if isinstance(patterns, str):
                raise JobError(f"{option} = {patterns!r} is one text", remedy=f"give a list: [{patterns!r}]")
        asked = PlaceOptions(
            platform=platform,
            memory_mb=memory_mb or 0,
            max_workers=max_workers or 0,
            channel=channel,
            lifetime_s=function_timeout_s or 0.0,
            settings=settings,
            simulation=simulation or Simulation(),
            preload=tuple(preload),
            autoscaling_factor=autoscaling_factor,
            idle_s=idle_timeout_s,
        )
        known, launch = taken_over(), present_launch()
        is_given_again = known is not None
        if known is None and durable is not None and durable.again:
            known = opened_again(durable.again)
            withdraw_stop(known[0])
        self._options, self._secrets, self._limits = admitted(asked, None if known is None else known[1])
        python = python_of(requirements, platform, self._limits, is_taken_over=known is not None)
        self._options = replace(self._options, python=python)
        self._run = folders.new_run_id(name) if known is None else known[0].run_id
        prices = load_prices("cache" if channel.startswith("redis") else "objects", prices_file)
        lock: IO[str] = io.StringIO()  # the process that gives a command again has the lock
        self._folder = folders.create(self._run) if known is None else known[0]
        if not is_given_again:
            lock = hold(self._folder)
        key = self._folder.create_key() if known is None else self._folder.signing_key()
        self._progress = ProgressBar(progress)
        self._rate: Callable[[], str] | None = None
        self._told_at = 0.0
        """Of the latest graph, for the progress bar."""
        self._session = Session(
            self._run,
            self._options,
            key=key,
            prices=prices,
            budget_usd=budget_usd,
            labels=labels,
            is_to_stop=lambda: bool(stop_requested(self._folder)),
            on_change=self._show,
            durable=durable,
        )
        self._timeout_s, self._tries = timeout_s, retries + 1
        self._durable = durable
        made = shipped(self._folder) if is_given_again else {}
        selection, keys = Selection(include=tuple(code_include), exclude=tuple(code_exclude)), code_keys(self._run)
        if made and platform == "simulated":
            find_code_of(made.values(), keys, self._folder.path / PROGRAM)
        self._shipper = Shipper(
            keys,
            [Path(folder) for folder in code],
            selection=selection,
            made=made,
            check=partial(check_modules, limits=self._limits, platform=platform),
        )
        self._shared = SharedArguments()
        self._names = TaskNames(by_content=known is not None or launch is not None)
        self._closed = False
        self._lock = threading.Lock()
        self._driver = driver_of(platform)(
            self._session,
            self._options,
            folder=self._folder,
            name=name,
            lock=lock,
            secrets=self._secrets,
            header=None if known is None else known[1],
            payload={} if durable is None else durable.payload(),
            launch=None if launch is None else partial(launch.begun, shipped=self._shipper.made),
        )

    # -- tasks ---------------------------------------------------------------------------------------------

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> TaskFuture:
        """Runs `fn(*args, **kwargs)` in a function.

        Args:
            fn: a function of a module, which is sent as its folder; a closure, a lambda, or one of a notebook, sent by value; or
                the name of one, `module:function`.
            args, kwargs: picklable.

        Raises:
            JobError: the function or an argument cannot be sent; named.
        """
        code = TaskCode(self._shipper, fn)
        return self._submit([self._one("call", code, (args, kwargs), self._pickler(code))])[0]

    def map(
        self, fn: Callable[..., Any] | str, *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Any]:
        """Runs `fn` for each item, or for each tuple of items of several iterables; returns an iterator over the results, in order.

        Args:
            fn: as for `submit`.
            iterables: of arguments; read at once.
            timeout: seconds from the call until a result must be there, else `TimeoutError`.
            chunksize: items of one task, which is tried, timed and cancelled as a whole. Tasks of milliseconds need no chunks: they
                are sent and recorded in batches anyway.

        Raises:
            JobError: the function or an item cannot be sent; named.
            TaskFailed: by the iterator: a task raised in all tries. It has the task's own traceback.
        """
        ends_at = None if timeout is None else time.monotonic() + timeout
        return _in_order(self.map_futures(fn, *iterables, chunksize=chunksize), ends_at, chunked=chunksize > 1)

    def map_futures(self, fn: Callable[..., Any] | str, *iterables: Iterable[Any], chunksize: int = 1) -> list[TaskFuture]:
        """The futures of the tasks of a `map`, in order; each has one result, or a list of `chunksize` results."""
        if chunksize < 1:
            raise JobError(f"chunksize = {chunksize} is below 1")
        if not iterables:
            raise JobError("map has no items", remedy="give a function and one or more iterables")
        code = TaskCode(self._shipper, fn)
        items = list(zip(*iterables))  # noqa: B905 - as `map` does: it ends with the shortest
        pickler = self._pickler(code, items)
        if chunksize == 1:
            made = [self._one("call", code, (item, {}), pickler) for item in items]
        else:
            parts = (items[at : at + chunksize] for at in range(0, len(items), chunksize))
            made = [self._one("chunk", code, part, pickler) for part in parts]
        return self._submit(made)

    def submit_items(
        self,
        code: TaskCode,
        calls: Sequence[tuple[str, tuple[Any, ...], Mapping[str, Any]]],
        *,
        seed: int | None = None,
        interval_s: float = 0.0,
        suffix: str = "",
    ) -> list[TaskFuture]:
        """Tasks of a durable map, which are recognised by their names when another process goes on with its run.

        Args:
            code: of the function; see `task_code`.
            calls: name of each item, 32 hexadecimal digits, and its arguments.
            seed, interval_s: see `functions.tasks.item_calls.call_item`.
            suffix: of the names of the tasks, which tells calls of other code, and later ones, apart.

        Returns:
            Their futures, in order; each result is an `ItemOutcome` as a tuple.

        Raises:
            JobError: an item cannot be sent.
        """
        pickler = self._pickler(code)
        return self._submit([self._one("item", code, ((*call, seed, interval_s), {}), pickler, id=f"i{call[0]}{suffix}") for call in calls])

    def reduce(self, fn: Callable[[Any, Any], Any] | str, items: Iterable[Any], *, fan_in: int = 8) -> TaskFuture:
        """Combines items by an associative function of two arguments, in a tree of tasks; order is kept.

        Args:
            fn: as for `submit`.
            items: at least one.
            fan_in: items that a task combines.
        """
        return self.map_reduce(_same, items, fn, chunksize=fan_in, fan_in=fan_in)

    def map_reduce(
        self,
        fn: Callable[[Any], Any] | str,
        items: Iterable[Any],
        combine: Callable[[Any, Any], Any] | str,
        *,
        chunksize: int = 8,
        fan_in: int = 8,
    ) -> TaskFuture:
        """Runs `fn` for each item and combines the results, without sending them through the client.

        Args:
            fn: as for `submit`.
            items: at least one.
            combine: associative function of two results.
            chunksize: items that a leaf of the tree maps and combines.
            fan_in: results that an inner task combines.
        """
        if fan_in < 2 or chunksize < 1:
            raise JobError(f"fan_in = {fan_in}, chunksize = {chunksize}", remedy="fan_in is at least 2, chunksize at least 1")
        every = [(item,) for item in items]
        if not every:
            raise JobError("there are no items to combine", remedy="give at least one")
        code, combining = TaskCode(self._shipper, fn), self._shipper.ship(combine)
        parts = [every[at : at + chunksize] for at in range(0, len(every), chunksize)]
        pickler = self._pickler(code, every)
        leaves = [self._one("fold", code, part, pickler, more=combining) for part in parts]
        name = self._names.name("r", *(leaf.spec.id.encode() for leaf in leaves))
        tree = grow(
            [leaf.spec for leaf in leaves],
            lambda id, inputs: self._spec(id, f"combine {combining.reference}", inputs=inputs),
            name=name,
            fan_in=fan_in,
            output=lambda task: f"{self._run}.out/{task}",
        )
        root = self._future(tree.root, name_of(combine))
        made = [
            Submission(
                spec=spec,
                objects=leaf.objects,
                future=root if spec.id == tree.root else None,
                edges=tree.edges if leaf is leaves[0] else (),
            )
            for spec, leaf in zip(tree.leaves, leaves, strict=True)
        ]
        for edge in tree.edges:
            future = root if edge.tasks[0].id == tree.root else None
            made.append(Submission(spec=edge.tasks[0], future=future, published_by_edge=True))
        self._add(made)
        return root

    def require(self, extra: str) -> None:
        """Refuses work that needs an extra of this package, such as `linalg`, which functions of a deployment do not have.

        Raises:
            JobError: names the packages, and the command that adds them.
        """
        check_extra(extra, self._limits, self._options.platform, what=extra)

    def shipment(self, function: Callable[..., Any] | str) -> Shipment:
        """A function as `run_graph` sends it; see `submit`."""
        return self._shipper.ship(function)

    def task_code(self, function: Callable[..., Any] | str) -> TaskCode:
        """A function as `submit_items` sends it; see `submit`."""
        return TaskCode(self._shipper, function)

    def run_graph(
        self,
        opener: Callable[..., Awaitable[ShippedGraph]],
        data: bytes,
        starts: Callable[[str, str], Iterator[tuple[TaskSpec, int]]],
        *,
        tasks: int,
        name: str,
        code: Sequence[Shipment],
        on_result: Callable[[TaskResult], None],
        rate: Callable[[], str] | None = None,
    ) -> TaskFuture:
        """Runs a graph of tasks of which each names those that follow it (`functions.shipped_tasks.ShippedGraph`).

        Args:
            opener: of an installed module; makes the graph from `data` where tasks run.
            data: of the graph; it is signed.
            starts: gives the tasks without inputs from others, and their order, from the name of the graph, with which ids begin
                (`NAME-…`), and `TaskSpec.function`.
            tasks: number of all tasks.
            name: for messages.
            code: that `data` names.
            on_result: called with each success, in another thread.
            rate: text for the progress bar.

        Returns:
            Its future; the result is None. Cancelled, or when a task has failed in all tries, no further result is awaited.
        """
        target = f"{opener.__module__}:{opener.__qualname__}"
        digest, id = digest_of(data), self._names.name("g", target.encode(), data)
        self._rate = rate
        graph = Graph(
            name=id,
            tasks=tasks,
            key=graph_key(self._run, digest),
            data=data,
            starts=starts(id, f"node {target} {digest}"),
            future=self._future(id, name),
            on_result=on_result,
            objects={k: v for one in code for k, v in one.objects.items()},
        )
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot submit a task to an executor that was shut down")
            self._driver.add_graph(graph)
        return graph.future

    # -- state ---------------------------------------------------------------------------------------------

    def bill(self) -> Bill:
        """The cost so far, at list prices."""
        return self._session.bill()

    @property
    def traffic(self) -> Traffic:
        """Requests and bytes of the functions that have ended, without the client's: all of them after `shutdown`."""
        return self._session.meter.traffic

    @property
    def memory_mb(self) -> int:
        """Memory of a function."""
        return self._options.memory_mb

    @property
    def limits(self) -> Limits:
        """Limits of the platform."""
        return self._limits

    @property
    def platform(self) -> str:
        """Name of the platform."""
        return self._options.platform

    @property
    def channel(self) -> str:
        """Address of the channel, without credentials."""
        return self._options.channel

    @property
    def queue(self) -> tuple[str, str]:
        """Address of the channel of its queue, without credentials, and the queue's name."""
        return address_of(self._options, self._folder.path), self._run

    @property
    def goes_on(self) -> bool:
        """Whether its tasks survive this process: another one gives the same command again (`--detach`)."""
        return self._names.by_content

    @property
    def vcpus(self) -> float:
        """CPU share of a function."""
        return self._options.memory_mb / self._limits.mb_per_vcpu

    @property
    def function_timeout_s(self) -> float:
        """Time limit of a function, which runs many tasks."""
        return self._options.lifetime_s

    @property
    def prices(self) -> Prices:
        """List prices with which cost is counted."""
        return self._session.meter.prices

    @property
    def python(self) -> str:
        """Interpreter of functions of this machine; empty: that of this process."""
        return self._options.python

    @property
    def max_workers(self) -> int:
        """Functions at once."""
        return self._options.max_workers

    @property
    def tries(self) -> int:
        """Of a task, the first one included."""
        return self._tries

    @property
    def shows_progress(self) -> bool:
        """Whether there is a progress bar."""
        return self._progress.is_shown

    @property
    def folder(self) -> Path:
        """Folder of the run, with the events and logs of the functions."""
        return self._folder.path

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the executor: no task can be submitted any more, and its functions end when their tasks are done.

        Args:
            wait: return when they have ended.
            cancel_futures: cancel tasks that have no result.
        """
        with self._lock:
            self._closed = True
        self._driver.close(cancel=cancel_futures, wait=wait)
        self._progress.stop()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.shutdown(cancel_futures=kind is not None)

    # -- inside --------------------------------------------------------------------------------------------

    def _spec(self, id: str, function: str, *, payload: bytes = b"", inputs: tuple[str, ...] = ()) -> TaskSpec:
        return TaskSpec(id=id, function=function, payload=payload, inputs=inputs, timeout_s=self._timeout_s, max_tries=self._tries)

    def _pickler(self, code: TaskCode, items: Sequence[tuple[Any, ...]] = ()) -> ArgumentPickler:
        return ArgumentPickler(f"{self._run}.in/", self._shared, items, what=f"an argument of {code.name}")

    def _one(
        self, form: str, task_code: TaskCode, arguments: Any, pickler: ArgumentPickler, *, more: Shipment | None = None, id: str = ""
    ) -> Submission:
        made = pickler.pickled(arguments)
        shipment = task_code.with_modules(pickler.modules)
        function = " ".join([form, shipment.reference, *([] if more is None else [more.reference])])
        id = id or self._names.name("t", function.encode(), made.payload, *(key.encode() for key in made.inputs))
        code = {**shipment.objects, **({} if more is None else more.objects)}
        objects = {key: self._shared.contents.setdefault(key, memoryview(data)) for key, data in code.items()}
        spec = self._spec(id, function, payload=made.payload, inputs=made.inputs)
        return Submission(spec=spec, future=self._future(id, shipment.name), objects={**objects, **made.objects})

    def _future(self, id: str, name: str) -> TaskFuture:
        return TaskFuture(id, name=name, on_cancel=self._cancelled)

    def _submit(self, made: list[Submission]) -> list[TaskFuture]:
        self._add(made)
        return [one.future for one in made if one.future is not None]

    def _add(self, made: list[Submission]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot submit a task to an executor that was shut down")
            self._driver.add(made)

    def _cancelled(self, future: TaskFuture) -> None:
        self._session.cancel(future.task)
        self._driver.wake()

    def _show(self) -> None:
        s, rate = self._session, self._rate if self._durable is None else self._durable.note
        done, of = (s.settled, s.total) if self._durable is None else self._durable.counts()
        self._progress.show(done, of, s.bill().cost_usd, functions=s.functions, note="" if rate is None else rate())
        if (now := time.monotonic()) - self._told_at >= _TOLD_EVERY_S and self.folder.is_dir():
            self._told_at = now
            with contextlib.suppress(OSError):  # other clients see less of it, and nothing else depends on it
                more = {} if self._durable is None else {"details": self._durable.details()}
                RunFolder(self.folder).write(PROGRESS_FILE, {"tasks": done, "of": of, **more})


def _in_order(futures: list[TaskFuture], ends_at: float | None, *, chunked: bool) -> Iterator[Any]:
    try:
        for future in futures:
            value = future.result(None if ends_at is None else max(0.0, ends_at - time.monotonic()))
            if chunked:
                yield from value
            else:
                yield value
    except KeyboardInterrupt as e:
        e.add_note(f"{sum(f.done() for f in futures)} of {human_count(len(futures), 'task')} are done, the rest is cancelled")
        raise
    finally:
        for future in futures:
            future.cancel()


def _same(item: Any) -> Any:
    return item
