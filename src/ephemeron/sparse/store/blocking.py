"""`BlockingSparseStore`: a sparse store for code without an event loop, such as scripts, notebooks and threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike

from ephemeron.communication.rpc.auth import Token
from ephemeron.sparse.store.client import SparseStore
from ephemeron.sparse.store.codec import Compression
from ephemeron.sparse.store.link import Locate
from ephemeron.sparse.store.messages import Initial, ShardStatus
from ephemeron.sparse.store.optimizers import Floats, Optimizer
from ephemeron.sparse.store.table_rows import TableInfo

T = TypeVar("T")


class BlockingSparseStore:
    """`SparseStore` with methods that block, on a thread of its own. For any number of threads.

    Pushes are acknowledged and resent in the background. A switch between threads costs some 0.1 ms a call: code on an event
    loop uses `SparseStore`.
    """

    def __init__(self, open: Callable[[], Coroutine[Any, Any, SparseStore]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sparse-store", daemon=True)
        self._thread.start()
        try:
            self.store = self._run(open())
        except BaseException:
            self._stop()
            raise

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str] | Locate,
        token: Token,
        *,
        shards: int | None = None,
        client: str = "",
        attempt: int = 0,
        values: str = "float32",
        compression: Compression | None = None,
        connect_s: float = 60.0,
        answer_s: float = 10.0,
    ) -> Self:
        """Connects; see `SparseStore.connect`."""
        return cls(
            lambda: SparseStore.connect(
                addresses,
                token,
                shards=shards,
                client=client,
                attempt=attempt,
                values=values,
                compression=compression,
                connect_s=connect_s,
                answer_s=answer_s,
            )
        )

    @property
    def sequence(self) -> int:
        """See `SparseStore.sequence`."""
        return self.store.sequence

    def create(self, table: str, rows: int, width: int = 1, *, optimizer: Optimizer, initial: float | Initial = 0.0) -> TableInfo:
        """See `SparseStore.create`."""
        return self._run(self.store.create(table, rows, width, optimizer=optimizer, initial=initial))

    def table(self, name: str) -> TableInfo:
        """See `SparseStore.table`."""
        return self._run(self.store.table(name))

    def multi_get(self, table: str, indices: ArrayLike) -> Floats:
        """See `SparseStore.multi_get`."""
        return self._run(self.store.multi_get(table, indices))

    def read(self, table: str) -> Floats:
        """See `SparseStore.read`."""
        return self._run(self.store.read(table))

    def push(self, table: str, indices: ArrayLike, gradient: ArrayLike, *, sequence: int | None = None) -> None:
        """See `SparseStore.push`."""
        self._run(self.store.push(table, indices, gradient, sequence=sequence))

    def assign(self, table: str, indices: ArrayLike, values: ArrayLike, *, sequence: int | None = None) -> None:
        """See `SparseStore.assign`."""
        self._run(self.store.assign(table, indices, values, sequence=sequence))

    def compress(self, table: str, compression: Compression) -> None:
        """See `SparseStore.compress`."""
        self.store.compress(table, compression)

    def push_residual(self, table: str) -> None:
        """See `SparseStore.push_residual`."""
        self._run(self.store.push_residual(table))

    def flush(self) -> None:
        """See `SparseStore.flush`."""
        self._run(self.store.flush())

    def get(self, key: str) -> bytes | None:
        """See `SparseStore.get`."""
        return self._run(self.store.get(key))

    def set(self, key: str, value: bytes) -> None:
        """See `SparseStore.set`."""
        self._run(self.store.set(key, value))

    def snapshot(self) -> None:
        """See `SparseStore.snapshot`."""
        self._run(self.store.snapshot())

    def status(self) -> list[ShardStatus]:
        """See `SparseStore.status`."""
        return self._run(self.store.status())

    def stop(self) -> None:
        """See `SparseStore.stop`."""
        self._run(self.store.stop())

    def close(self, *, flush: bool = True) -> None:
        """See `SparseStore.close`."""
        try:
            self._run(self.store.close(flush=flush))
        finally:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(flush=error is None)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
