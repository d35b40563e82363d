"""scikit-learn, and whatever else uses joblib, on serverless functions.

    import ephemeron.joblib, joblib

    ephemeron.joblib.register()
    with joblib.parallel_config("ephemeron", n_jobs=8, memory_mb=1769):
        GridSearchCV(model, grid).fit(X, y)

    with ephemeron.joblib.functions(n_jobs=8, platform="aws", channel="s3://bucket/prefix", budget_usd=1.0) as pool:
        GridSearchCV(model, grid).fit(X, y)
    print(pool.bill())

Both take the options of `FunctionExecutor`; the second has the executor, with its bill, at hand. See `integrations.joblib_backend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ephemeron.errors import MissingExtra

if TYPE_CHECKING:
    from ephemeron.executor import FunctionExecutor

__all__ = ["functions", "register"]


def register() -> None:
    """Makes `"ephemeron"` a back end of joblib: for `joblib.parallel_config("ephemeron", …)`, and for `joblib.Parallel(backend="ephemeron", …)`
    from joblib 1.5 on.

    Both take `n_jobs`, the number of functions (-1: as many as `FunctionExecutor` starts by default), and the options of
    `FunctionExecutor`; or `pool=`, an executor, which is not shut down. Functions of calls within one `parallel_config` are the same, and end
    after it.

    Raises:
        MissingExtra: joblib is not installed.
    """
    backend = _backend()
    from joblib import register_parallel_backend

    register_parallel_backend("ephemeron", backend)


@contextmanager
def functions(*, n_jobs: int = -1, **options: Any) -> Iterator[FunctionExecutor]:
    """A context in which joblib runs on functions, with their executor.

    Args:
        n_jobs: functions at once; -1: as many as `FunctionExecutor` starts by default. Estimators and `Parallel` that say `n_jobs=1` run here.
        options: of `FunctionExecutor`.

    Yields:
        The executor; its `bill()` is complete after the context.

    Raises:
        JobError: an option is refused. Nothing was started.
        MissingExtra: joblib is not installed.
    """
    with _backend().opened(n_jobs, options) as pool:
        yield pool


def _backend() -> Any:
    try:
        from ephemeron.integrations.joblib_backend import EphemeronBackend
    except ModuleNotFoundError as e:
        if e.name != "joblib":
            raise
        raise MissingExtra("joblib", "joblib") from None
    return EphemeronBackend
