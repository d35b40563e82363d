"""What the runtime asks about a program at given sizes: the port between LAmbdaPACK and its execution.

`analysis.Analysis` answers by solving equations over loop bounds, in time and memory that do not depend on the sizes
(algorithms 1 and 2 of NumPyWren); `unrolled.UnrolledGraph` answers from the whole graph, for tests, pictures and small sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from ephemeron.linalg.language.program import KernelCall, Node, Program, Tile


class TaskGraph(Protocol):
    """Tasks of a program at given sizes, and what depends on what.

    Task B is downstream of task A where B reads a tile that A writes. Each method is a pure function of program and sizes, so
    every executor can ask for itself.
    """

    @property
    def program(self) -> Program:
        """The program."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of tiles, by name of the size."""
        ...

    def count(self) -> int:
        """Number of tasks."""
        ...

    def start_nodes(self) -> Iterator[Node]:
        """Tasks without upstream tasks, each once, in a fixed order; produced as they are consumed."""
        ...

    def call(self, node: Node) -> KernelCall:
        """The kernel call of `node`; `KeyError` where the program has none at its line."""
        ...

    def bindings(self, node: Node) -> dict[str, int]:
        """Values of sizes, loop variables and assigned scalars at `node`."""
        ...

    def reads(self, node: Node) -> tuple[Tile, ...]:
        """Tiles that `node` reads, in the order of the kernel's arguments; a tile read twice is there twice."""
        ...

    def writes(self, node: Node) -> tuple[Tile, ...]:
        """Tiles that `node` writes, in the order of the kernel's outputs."""
        ...

    def writer(self, matrix: str, index: tuple[int, ...]) -> Node | None:
        """The task that writes a tile; None where no task does (a tile of an input)."""
        ...

    def upstream(self, node: Node) -> tuple[Node, ...]:
        """Tasks that write what `node` reads, each once, sorted."""
        ...

    def upstream_count(self, node: Node) -> int:
        """Number of tasks in `upstream(node)`: `node` may start when so many different tasks that have it downstream ended."""
        ...

    def downstream(self, node: Node) -> tuple[Node, ...]:
        """Tasks that read what `node` writes, each once, sorted."""
        ...

    def readers(self, matrix: str, index: tuple[int, ...]) -> Iterator[Node]:
        """Tasks that read a tile, each once."""
        ...

    def reader_count(self, matrix: str, index: tuple[int, ...]) -> int:
        """Number of tasks that read a tile: once so many have ended, a temporary tile can be deleted."""
        ...
