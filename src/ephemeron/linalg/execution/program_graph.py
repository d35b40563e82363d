"""A program as a graph of tasks: each task knows its tiles, those that follow it, and how often tiles are read (NumPyWren, survey 2.4).

Nothing is unrolled: functions ask the analysis. A task's outputs are created once, so that a task may run twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.wrappers import size_of
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, MatrixError
from ephemeron.functions.shipped_tasks import Load, ShippedGraph
from ephemeron.functions.tasks.model import TaskEdge, TaskSpec
from ephemeron.functions.tasks.object_places import placed
from ephemeron.functions.tasks.result_store import TaskOutputs
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.interface import TaskGraph
from ephemeron.linalg.analysis.unrolled import UnrolledGraph, chain_orders, described, has_more_tasks
from ephemeron.linalg.execution.program_data import ProgramData, check_finite, located_error
from ephemeron.linalg.language.expressions import evaluate
from ephemeron.linalg.language.kernel import Kernel
from ephemeron.linalg.language.parser import parse_text
from ephemeron.linalg.language.program import KernelCall, Node, Program, Role, Tile, TileReference, kernel_calls
from ephemeron.linalg.matrices.stored import TileFamily, decode_tile, encode_tile

_MOST_ORDER = 99_999_999
_FEW_TASKS = 1500
"""Of a graph that is written down where it runs: looking up what follows a task is quicker there than solving for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTraffic:
    """Result of a task, beside its tiles."""

    read: int
    """Bytes of tiles."""
    written: int
    stored: int = 0
    """1: its tiles were there from an earlier run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Arguments of a task: its node."""

    line: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Listing:
    """Tiles that were stored at one moment."""

    stored: frozenset[str]
    """Keys."""
    done: dict[Node, bool] = field(default_factory=dict)
    """By task: whether it had ended then, as far as that was asked."""


class ProgramGraph(ShippedGraph):
    """Tasks of a program.

    Args:
        data: of the program.
        program: that `data` describes.
    """

    def __init__(self, data: ProgramData, program: Program) -> None:
        self._data, self._program = data, program
        is_large = has_more_tasks(program, data.sizes, _FEW_TASKS)
        self._graph: TaskGraph = Analysis(program, data.sizes) if is_large else UnrolledGraph(program, data.sizes)
        self._orders: Mapping[Node, int] = chain_orders(self._graph) if isinstance(self._graph, UnrolledGraph) else {}
        self.kernels: Mapping[str, Kernel] = {}
        """By name; none where nothing is computed."""
        self._channel: Channel | None = None
        self._listing = _Listing(frozenset())
        self._finite: set[str] = set()
        """Keys of tiles of inputs that were found to be so: each is looked at once where it is read."""
        self._lines = max(program.calls) + 1
        self._parts = _parts(program)

    # -- tasks

    @property
    def tasks(self) -> int:
        """Number of all tasks."""
        return self._graph.count()

    def starts(self, name: str, function: str) -> Iterator[tuple[TaskSpec, int]]:
        """Tasks that read nothing that another task writes, and their order."""
        return ((self.task(node, name, function), self.order(node)) for node in self._graph.start_nodes())

    def task(self, node: Node, name: str, function: str) -> TaskSpec:
        """The task of a node.

        Args:
            node: of the program.
            name: with which ids begin.
            function: of all tasks of the graph.
        """
        keys = dict.fromkeys(key for tile in self._graph.reads(node) if (key := self.key(tile)))
        return TaskSpec(
            id=_id(node, name),
            function=function,
            arguments=plain(_Place(line=node.line, indices=node.indices)),
            max_tries=self._data.tries,
            inputs=tuple(keys),
            then=tuple(_id(child, name) for child in self._graph.downstream(node)),
        )

    def edges(self, task: TaskSpec) -> Sequence[TaskEdge]:
        name = task.id.partition("-")[0]
        return [
            TaskEdge(
                name=_id(child, name),
                inputs=self._graph.upstream_count(child),
                tasks=(self.task(child, name, task.function),),
                order=self.order(child),
            )
            for child in self._graph.downstream(_node(task))
        ]

    def order(self, node: Node) -> int:
        """Of a small graph: tasks with the longest chain behind them first. Of a large one: in the order of the outermost loops, then
        of their steps, then of the text."""
        if self._orders:
            return self._orders[node]
        first, room = node.indices[0] if node.indices else 0, _MOST_ORDER // (self._parts[max(self._parts)] + 1)
        return self._parts[node.line] * room + min(first * self._lines + node.line, room - 1)

    def readers(self, task: TaskSpec) -> Mapping[str, int]:
        found = {}
        for matrix, index in self._graph.reads(_node(task)):
            key = self.key((matrix, index))
            if key and self._program.matrix(matrix).role is Role.TEMPORARY:
                found[key] = self._graph.reader_count(matrix, index)
        return found

    # -- tiles

    def key(self, tile: Tile) -> str:
        """Of the object of a tile; empty: the tile is zero, and is not stored."""
        matrix, index = tile
        if (known := self._data.matrices.get(matrix)) is not None:
            i, j = index
            return known.key(i, j) if known.is_stored(i, j) else ""
        return self._family(matrix).key(index)

    def _family(self, matrix: str) -> TileFamily:
        temporary = TileFamily(store=self._data.store, name=f"{self._data.temporaries}/{matrix}")
        return self._data.families.get(matrix, temporary)

    async def open(self, channel: Channel) -> None:
        """Looks for tiles of an earlier run, if there was one."""
        self._channel = channel
        if self._data.resumes:
            self._listing = await self._listed(channel)

    async def _listed(self, channel: Channel) -> _Listing:
        # Temporary tiles first: one that is not there any more was deleted after what was made of it was stored.
        prefixes = [placed(self._data.store, f"{self._data.temporaries}/")]
        for matrix in self._program.matrices:
            if matrix.role is Role.OUTPUT:
                known = self._data.matrices.get(matrix.name) or self._family(matrix.name)
                prefixes.append(placed(known.store, f"{known.name}/"))
        found = [await channel.list(prefix) for prefix in dict.fromkeys(prefixes)]
        return _Listing(frozenset(key for keys in found for key in keys))

    def is_stored(self, task: TaskSpec) -> bool:
        listing = self._listing
        return bool(listing.stored) and self._was_done(_node(task), listing)

    async def look_again(self, task: TaskSpec) -> bool:
        """Whether another run that computes the same (of a client that was killed) has ended the task meanwhile."""
        if self._channel is None:
            return False
        self._listing = await self._listed(self._channel)
        return self.is_stored(task)

    async def unread(self, task: TaskSpec) -> Sequence[str]:
        if self._channel is None:
            return ()
        written = [
            (key, [*self._graph.readers(*tile)])
            for tile in self._graph.writes(_node(task))
            if self._program.matrix(tile[0]).role is Role.TEMPORARY and (key := self.key(tile))
        ]
        if not written:
            return ()
        listing = await self._listed(self._channel)
        return [key for key, readers in written if key in listing.stored and all(self._was_done(reader, listing) for reader in readers)]

    def _was_done(self, node: Node, listing: _Listing) -> bool:
        """Whether all its tiles were there, or had been deleted because all that read them had ended."""
        asked, done = [node], listing.done
        while asked:
            if asked[-1] in done:
                asked.pop()
                continue
            missing = [tile for tile in self._kept(asked[-1]) if self.key(tile) not in listing.stored]
            deleted = all(self._program.matrix(matrix).role is Role.TEMPORARY for matrix, _ in missing)
            readers = [reader for tile in missing for reader in self._graph.readers(*tile)] if deleted else []
            unknown = next((reader for reader in readers if reader not in done), None)
            if unknown is not None:
                asked.append(unknown)
                continue
            done[asked.pop()] = not missing or (bool(readers) and all(done[r] for r in readers))
        return done[node]

    def _kept(self, node: Node) -> Sequence[Tile]:
        """Tiles that a task stores: of several that it writes, not the temporary ones that no task reads, which nothing would delete."""
        written = self._graph.writes(node)
        if len(written) == 1:
            return written
        kept = [tile for tile in written if self._program.matrix(tile[0]).role is not Role.TEMPORARY or self._graph.reader_count(*tile)]
        return kept or written

    # -- computing

    def run(self, task: TaskSpec, inputs: Sequence[memoryview]) -> object:
        if self.is_stored(task):
            return plain(TaskTraffic(read=0, written=0, stored=1))
        node = _node(task)
        call, values = self._graph.call(node), self._graph.bindings(node)
        tiles = {key: decode_tile(data, key=key) for key, data in zip(task.inputs, inputs, strict=True)}
        self._check(node, tiles)
        try:
            outputs = self.kernels[call.kernel].run(
                *self._arguments(call, node, values, tiles), **{name: _option(option, values) for name, option in call.options}
            )
        except MatrixError as error:
            written = self._graph.writes(node)
            raise located_error(error, self._program.name, map(described, written), first_row=self._first_row(written[0])) from None
        kept = set(self._kept(node))
        objects = {
            self.key(tile): encode_tile(np.asarray(array))
            for tile, array in zip(self._graph.writes(node), outputs, strict=True)
            if tile in kept
        }
        traffic = TaskTraffic(read=sum(d.nbytes for d in inputs), written=sum(map(size_of, objects.values())))
        return TaskOutputs(objects=objects, value=plain(traffic))

    def _check(self, node: Node, tiles: Mapping[str, npt.NDArray[Any]]) -> None:
        for matrix, index in self._graph.reads(node) if self._data.checked else ():
            key, known = self.key((matrix, index)), self._data.matrices.get(matrix)
            if matrix in self._data.checked and known is not None and key and key not in self._finite:
                i, j = index
                rows, columns = known.slices(i, j)
                check_finite(
                    known.seen(tiles[key]), matrix=matrix, first=(rows.start, columns.start), index=(i, j), name=self._program.name
                )
                self._finite.add(key)

    def _first_row(self, tile: Tile) -> int | None:
        known = self._data.matrices.get(tile[0])
        return None if known is None else tile[1][0] * known.tile_rows

    def _arguments(self, call: KernelCall, node: Node, values: Mapping[str, int], tiles: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
        reads = iter(self._graph.reads(node))
        return [
            self._tile(next(reads), tiles) if isinstance(argument, TileReference) else evaluate(argument, values)
            for argument in call.arguments
        ]

    def _tile(self, tile: Tile, tiles: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
        matrix, index = tile
        known, key = self._data.matrices.get(matrix), self.key(tile)
        if known is None:
            return tiles[key]
        if not key:
            i, j = index
            return np.zeros(known.tile_shape(i, j), known.dtype)
        return known.seen(tiles[key])


async def open_program(data: bytes, channel: Channel, load: Load) -> ProgramGraph:
    """The graph of `ProgramData`, where tasks run."""
    found, kernels = ProgramData.from_bytes(data), {}
    for name, reference in found.kernels.items():
        kernel = await load(reference)
        if not isinstance(kernel, Kernel):
            raise JobError(f"{name} is no kernel", remedy="decorate the function with @kernel()")
        kernels[name] = kernel
    graph = ProgramGraph(found, parse_text(found.text, kernels))
    graph.kernels = kernels
    await graph.open(channel)
    return graph


def _parts(program: Program) -> dict[int, int]:
    """Number of the outermost statement around each kernel call, by line."""
    return {call.line: n for n, statement in enumerate(program.body) for call, _ in kernel_calls((statement,))}


def _id(node: Node, name: str) -> str:
    return "-".join(map(str, (name, node.line, *node.indices)))


def _node(task: TaskSpec) -> Node:
    place = build(_Place, task.arguments, where=task.id)
    return Node(place.line, place.indices)


def _option(option: object, values: Mapping[str, int]) -> object:
    return option if isinstance(option, (bool, int, float, str)) else evaluate(option, values)  # type: ignore[arg-type]
