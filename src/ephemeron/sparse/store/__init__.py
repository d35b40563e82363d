"""Sparse parameter store: tables of parameters on shards, read by multi-get and changed by sparse gradients (Cirrus).

    store = await SparseStore.connect(["127.0.0.1:7090"], token)        # BlockingSparseStore.connect(...)
    await store.create("weights", rows=1 << 20, optimizer=FTRL(alpha=0.1, l1=1e-4))
    weights = await store.multi_get("weights", indices)
    await store.push("weights", indices, gradient)

Shards: `ephemeron serve sparse`. Specification: survey sections 2.1 and 2.2; guarantees and figures: `docs/sparse.md`.
"""

from ephemeron.sparse.store.blocking import BlockingSparseStore
from ephemeron.sparse.store.client import SparseStore
from ephemeron.sparse.store.codec import Compression
from ephemeron.sparse.store.messages import Initial, ShardStatus
from ephemeron.sparse.store.optimizers import FTRL, SGD, AdaGrad, Adam, Optimizer, Sum
from ephemeron.sparse.store.table_rows import TableInfo

__all__ = [
    "FTRL",
    "SGD",
    "AdaGrad",
    "Adam",
    "BlockingSparseStore",
    "Compression",
    "Initial",
    "Optimizer",
    "ShardStatus",
    "SparseStore",
    "Sum",
    "TableInfo",
]
