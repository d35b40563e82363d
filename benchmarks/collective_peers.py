"""Public implementations of a reduction through S3, run from their own checkouts.

No part of them is in this repository. `load` searches a folder for checkouts of LambdaML (`communicator/`,
`storage/`) and of FasDL (`K-Reduce/FasDL_worker/app.py`), and gives each of their reductions one signature. They run
unchanged: their own S3 client, listing, and order of requests. Only their environment is ours: buckets, vectors, and
the deletion of old objects between rounds, which is not timed.
"""

from __future__ import annotations

import ast
import io
import sys
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Reduce = Callable[[np.ndarray, int], object]
"""Reduces one vector; the second argument is the number of the round, from 0."""


class Peer(NamedTuple):
    """A public implementation of a reduction."""

    name: str
    aggregators: Callable[[int], list[int]]
    """Supported numbers K of aggregators, given W."""
    note: str
    """Difference from a reduction in which every rank gets the mean of this round."""
    build: Callable[[Path, str, int, int, int], Reduce]
    """From the checkout, a prefix for its two buckets, rank, W and K."""


class PeerMissing(Exception):
    """No known checkout is below the folder."""


def find(folder: Path) -> list[tuple[Peer, Path]]:
    """Peers whose checkouts are below `folder`, each with its checkout.

    Raises:
        PeerMissing: there is none.
    """
    found: list[tuple[Peer, Path]] = []
    for checkout in sorted(p for p in [folder, *folder.iterdir()] if p.is_dir()):
        if (checkout / "communicator" / "s3_primitive.py").is_file():
            found += [(_LAMBDAML_ALL, checkout), (_LAMBDAML_SCATTER, checkout)]
        if (checkout / "K-Reduce" / "FasDL_worker" / "app.py").is_file():
            found.append((_FASDL, checkout))
    if not found:
        raise PeerMissing(f"{folder} holds no checkout of LambdaML (communicator/) or FasDL (K-Reduce/)")
    return found


def buckets(prefix: str) -> tuple[str, str]:
    """Buckets of contributions and of merged vectors."""
    return f"{prefix}-tmp", f"{prefix}-merged"


def _lambdaml(checkout: Path) -> tuple[Any, Any]:
    # Its packages import each other by top-level name; last on the path, so that it shadows no library.
    if str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    from communicator import s3_primitive  # type: ignore[import-not-found]
    from storage.s3.s3_type import S3Storage  # type: ignore[import-not-found]

    return s3_primitive, S3Storage()


def _lambdaml_all(checkout: Path, prefix: str, rank: int, world: int, aggregators: int) -> Reduce:
    primitive, storage = _lambdaml(checkout)
    tmp, merged = buckets(prefix)
    return lambda vector, t: primitive.reduce_batch(storage, vector, tmp, merged, world, rank, f"0_{t}")


def _lambdaml_scatter(checkout: Path, prefix: str, rank: int, world: int, aggregators: int) -> Reduce:
    primitive, storage = _lambdaml(checkout)
    tmp, merged = buckets(prefix)
    return lambda vector, t: primitive.reduce_scatter_batch(storage, vector, tmp, merged, world, rank, f"0_{t}")


def _fasdl(checkout: Path, prefix: str, rank: int, world: int, aggregators: int) -> Reduce:
    import boto3

    path = checkout / "K-Reduce" / "FasDL_worker" / "app.py"
    # The module imports torchvision for its models; its reduction needs NumPy only, so it alone is compiled.
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "k_reduce"]
    tmp, merged = buckets(prefix)
    scope: dict[str, Any] = {"np": np, "time": time, "urllib": urllib, "tmp_bucket": tmp, "merged_bucket": merged}
    exec(compile(tree, str(path), "exec"), scope)
    client = boto3.client("s3")

    def reduce(vector: np.ndarray, t: int) -> object:
        half = vector.size // 2
        layers = [vector[:half], vector[half:]]  # it flattens only models of at least two layers
        return scope["k_reduce"](client, layers, world, rank, aggregators, io.StringIO(), t + 1)

    return reduce


_LAMBDAML_ALL = Peer("LambdaML AllReduce", lambda w: [1], "sums, does not divide", _lambdaml_all)
_LAMBDAML_SCATTER = Peer("LambdaML ScatterReduce", lambda w: [w], "sums, does not divide", _lambdaml_scatter)
_FASDL = Peer(
    "FasDL K-REDUCE", lambda w: sorted({1, 2, w} if w > 2 else {1, w}), "non-aggregators read the mean of the round before (HAP)", _fasdl
)
