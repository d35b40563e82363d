"""joblib on functions: searches of scikit-learn and plain `Parallel` give what they give without functions."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lazy_modules import lazy_import

joblib = pytest.importorskip("joblib", reason="no joblib; pip install 'ephemeron[joblib]'")
_WITHOUT = "no scikit-learn; pip install 'ephemeron[digits]'"
datasets, ensemble = lazy_import("sklearn.datasets", reason=_WITHOUT), lazy_import("sklearn.ensemble", reason=_WITHOUT)
inspection, linear_model = lazy_import("sklearn.inspection", reason=_WITHOUT), lazy_import("sklearn.linear_model", reason=_WITHOUT)
metrics, model_selection = lazy_import("sklearn.metrics", reason=_WITHOUT), lazy_import("sklearn.model_selection", reason=_WITHOUT)
pipeline = lazy_import("sklearn.pipeline", reason=_WITHOUT)

from joblib import Parallel, delayed  # noqa: E402
from joblib.parallel import get_active_backend  # noqa: E402

import ephemeron.joblib  # noqa: E402
from ephemeron import FunctionExecutor  # noqa: E402
from ephemeron.errors import BudgetReached, JobError, MissingExtra, TaskFailed, UserError  # noqa: E402
from ephemeron.integrations.joblib_backend import BatchSize, EphemeronBackend  # noqa: E402
from ephemeron.runs import folders  # noqa: E402
from ephemeron.runs.summary import read_summary  # noqa: E402

PLATFORMS = ["simulated", pytest.param("local", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _registered(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    ephemeron.joblib.register()


def config(n_jobs=2, platform="simulated", **options):
    return joblib.parallel_config("ephemeron", n_jobs=n_jobs, platform=platform, **options)


def functions(n_jobs=2, platform="simulated", **options):
    return ephemeron.joblib.functions(n_jobs=n_jobs, platform=platform, **options)


def found():
    """What a search, a cross-validation, and permutations of columns find."""
    x, y = datasets.load_iris(return_X_y=True)
    search = model_selection.GridSearchCV(
        ensemble.RandomForestClassifier(random_state=0), {"n_estimators": [2, 4], "max_depth": [1, 3]}, cv=3
    ).fit(x, y)
    results = {name: np.asarray(values).tolist() for name, values in search.cv_results_.items() if "time" not in name}
    scores = model_selection.cross_val_score(linear_model.LogisticRegression(max_iter=500), x, y, cv=4, scoring="neg_log_loss")
    importances = inspection.permutation_importance(search.best_estimator_, x, y, n_repeats=3, random_state=1).importances
    return search.best_params_, results, scores.tolist(), importances.tolist()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_searches_find_what_they_find_without_functions(platform):
    alone = found()
    with config(platform=platform):
        assert found() == alone
    with functions(platform=platform) as pool:
        assert found() == alone
    assert pool.bill().tasks > 6, "batches of 12 fits, 4 fits and 4 columns"
    assert pool.bill().invocations >= 1


@pytest.mark.slow
def test_searches_find_what_is_found_here():
    """What loky finds is in `test_joblib_example`, in a process of its own: it leaves a process and files until that ends."""
    with joblib.parallel_config("sequential"):
        found_here = found()
    with config(platform="local"):
        assert found() == found_here


@pytest.mark.slow
def test_a_search_on_lambda(s3_server, monkeypatch):
    pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
    pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "functions" / "aws"))
    from aws_world import KEYS, deployed

    from ephemeron.testing.lambda_service import LambdaService

    x, y = datasets.load_iris(return_X_y=True)
    grid = {"C": [0.1, 1.0, 10.0]}
    alone = model_selection.GridSearchCV(linear_model.LogisticRegression(max_iter=500), grid, cv=3).fit(x, y)
    s3 = {"AWS_ENDPOINT_URL_S3": s3_server.env["AWS_ENDPOINT_URL"]}
    for name, value in {**KEYS, **s3}.items():
        monkeypatch.setenv(name, value)
    with LambdaService(concurrency=4, environment=s3) as service:
        settings = deployed(service, memory_mb=512, timeout_s=120)
        with functions(platform="aws", settings=settings, channel=s3_server.address) as pool:
            search = model_selection.GridSearchCV(linear_model.LogisticRegression(max_iter=500), grid, cv=3).fit(x, y)
            with pytest.raises(ZeroDivisionError):
                Parallel()(delayed(divmod)(1, n) for n in range(2))
    assert search.best_params_ == alone.best_params_
    assert search.cv_results_["mean_test_score"].tolist() == alone.cv_results_["mean_test_score"].tolist()
    assert pool.bill().gb_seconds > 0


@pytest.mark.slow
def test_modules_of_own_estimators_and_scores_are_sent():
    from own_estimators import Power, share

    x, y = datasets.load_iris(return_X_y=True)
    search = model_selection.GridSearchCV(
        pipeline.make_pipeline(Power(), linear_model.LogisticRegression(max_iter=500)),
        {"power__power": [1, 2]},
        scoring=metrics.make_scorer(share),
        error_score="raise",
    )
    alone = search.fit(x, y).cv_results_["mean_test_score"].tolist()
    with functions(platform="local"):
        assert search.fit(x, y).cv_results_["mean_test_score"].tolist() == alone


# -- plain Parallel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_form_of_parallel(platform):
    by = 3
    with config(platform=platform, retries=0):
        assert Parallel()(delayed(lambda x: x * by)(n) for n in range(300)) == [3 * n for n in range(300)]
        assert Parallel(batch_size=7, pre_dispatch="all")(delayed(pow)(2, n) for n in range(20)) == [2**n for n in range(20)]
        assert list(Parallel(return_as="generator")(delayed(abs)(-n) for n in range(30))) == list(range(30))
        assert sorted(Parallel(return_as="generator_unordered")(delayed(abs)(-n) for n in range(30))) == list(range(30))
        assert Parallel()(delayed(sorted)([1, -2], key=abs, reverse=n > 0) for n in range(3)) == [[1, -2], [-2, 1], [-2, 1]]
        assert Parallel()([]) == []
        with Parallel() as parallel:
            assert parallel(delayed(divmod)(7, n) for n in (2, 3)) == [(3, 1), (2, 1)]
            with pytest.raises(ZeroDivisionError):
                parallel(delayed(divmod)(7, n) for n in range(3))
            assert parallel(delayed(divmod)(7, n) for n in (2, 3)) == [(3, 1), (2, 1)]


def test_one_array_within_a_batch_is_one_and_changes_between_batches_are_seen():
    def first(a, b):
        return float(a[0]), a is b

    x = np.zeros(10_000)

    def changing():
        for n in range(3):
            x[0] = n
            yield delayed(first)(x, x)

    with functions(n_jobs=1):  # joblib takes two calls at once from the iterable
        assert Parallel(batch_size=1)(changing()) == [(1.0, True), (1.0, True), (2.0, True)]


def test_the_size_of_batches_follows_what_functions_compute():
    size = BatchSize()
    for _ in range(20):
        size.completed(size.size, 0.001 * size.size)
    assert size.size == 500
    size.completed(10, 0.01)
    assert size.size == 500, "smaller ones that were under way change nothing"
    for _ in range(5):
        size.completed(500, 500 * 10.0)
    assert size.size == 1, "calls take long now"
    size.completed(1, 0.0)
    assert size.size == 1
    with functions(n_jobs=1) as pool:
        Parallel()(delayed(abs)(n) for n in range(2000))
    assert 20 < pool.bill().tasks < 500


def test_where_calls_are_made_for_a_number_of_jobs():
    here = threading.get_ident()
    with config(n_jobs=3):
        assert Parallel(n_jobs=1)(delayed(threading.get_ident)() for _ in range(2)) == [here] * 2
        assert [joblib.effective_n_jobs(n) for n in (1, 2, 8, -1, -2, None)] == [1, 2, 8, 3, 2, 3]
        with pytest.raises(ValueError, match="n_jobs == 0"):
            Parallel(n_jobs=0)(delayed(abs)(n) for n in range(2))
    with joblib.parallel_config("ephemeron", platform="simulated"):
        assert joblib.effective_n_jobs() == 100
    with functions(n_jobs=1) as pool:
        assert joblib.effective_n_jobs(8) == 2, "else joblib would make the calls here"
        assert here not in Parallel()(delayed(threading.get_ident)() for _ in range(2))
    assert pool.bill().invocations == 1


def nested():
    """Back end and threads of a `Parallel` in a call, and of one below that."""

    def below():
        return type(get_active_backend()[0]).__name__

    inside = Parallel(n_jobs=4)
    threads = inside._effective_n_jobs()
    return below(), threads, set(inside(delayed(below)() for _ in range(3))), joblib.effective_n_jobs(-1)


@pytest.mark.parametrize(
    ("memory_mb", "seen"),
    [(1769, ("SequentialBackend", 1, {"SequentialBackend"}, 1)), (3 * 1769, ("FunctionThreads", 3, {"SequentialBackend"}, 3))],
)
def test_a_parallel_in_a_call_has_the_vcpus_of_its_function(memory_mb, seen):
    x, y = datasets.load_iris(return_X_y=True)
    with config(memory_mb=memory_mb):
        assert Parallel()(delayed(nested)() for _ in range(3)) == [seen] * 3
        forest = ensemble.RandomForestClassifier(n_estimators=6, random_state=0, n_jobs=4)
        scores = model_selection.cross_val_score(forest, x, y)
    assert scores.tolist() == model_selection.cross_val_score(forest, x, y).tolist()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_functions_are_kept_from_one_call_to_the_next_and_end_after_the_context(platform):
    with config(platform=platform):
        assert Parallel()(delayed(abs)(-n) for n in range(3)) == [0, 1, 2]
        assert Parallel()(delayed(abs)(-n) for n in range(3)) == [0, 1, 2]
        [folder] = folders.all_runs()
    running = [t for t in threading.enumerate() if t.name == f"ephemeron-{folder.run_id}"]
    for thread in running:
        thread.join(60)
        assert not thread.is_alive()
    summary = read_summary(folder)
    assert (summary.status, folder.run_id.startswith("joblib-")) == ("finished", True)
    if platform == "local":
        assert 1 <= summary.invocations <= 2


def test_an_executor_that_stands_is_used_and_not_shut_down():
    with FunctionExecutor("simulated", max_workers=3) as pool:
        with joblib.parallel_config("ephemeron", pool=pool):
            assert Parallel()(delayed(abs)(-n) for n in range(9)) == list(range(9))
            with pytest.raises(ZeroDivisionError):
                Parallel()(delayed(divmod)(1, n) for n in range(9))
        assert pool.submit(abs, -1).result() == 1
    with joblib.parallel_config("ephemeron", pool=pool), pytest.raises(RuntimeError, match="shut down"):
        Parallel()(delayed(abs)(-n) for n in range(9))


# -- large arguments ------------------------------------------------------------------------------------------------


def large(kind):
    values = np.random.default_rng(0).standard_normal((4000, 40))
    if kind == "array":
        return values
    pandas = pytest.importorskip("pandas", reason="no pandas; pip install 'ephemeron[pandas]'")
    frame = pandas.DataFrame(values, columns=[f"c{n}" for n in range(40)])
    if kind == "text":
        frame["text"] = [f"row {n} of a table" for n in range(len(frame))]
    return frame


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["array", "frame", "text"])
def test_what_all_calls_have_is_stored_and_fetched_once(kind):
    data, labels = large(kind), np.arange(4000) % 2

    def score(x, y, n):
        return float(np.asarray(x)[n, 0]) + int(y[n])

    with functions(n_jobs=2, platform="local") as pool:
        got = Parallel(batch_size=1)(delayed(score)(data, labels, n) for n in range(40))
        kept = [
            path.stat().st_size for path in (pool.folder / "objects").rglob("*") if f"{pool.folder.name}.in" in str(path) and path.is_file()
        ]
    assert got == [score(data, labels, n) for n in range(40)]
    assert pool.bill().tasks == 40
    nbytes = data.nbytes if kind == "array" else int(data.memory_usage(deep=True).sum())
    assert 0.5 * nbytes < sum(kept) < 1.5 * nbytes, "of 40 tasks"
    assert pool.traffic.bytes_down < 8 * nbytes, "two or three times for each of two functions"


@pytest.mark.slow
def test_a_search_stores_its_samples_once():
    data, labels = large("array"), np.arange(4000) % 2
    with functions(n_jobs=2, platform="local") as pool:
        model_selection.GridSearchCV(linear_model.LogisticRegression(max_iter=5), {"C": [0.1, 1.0, 10.0, 20.0]}, cv=3).fit(data, labels)
        kept = [
            path.stat().st_size for path in (pool.folder / "objects").rglob("*") if f"{pool.folder.name}.in" in str(path) and path.is_file()
        ]
    assert pool.bill().tasks > 3
    assert data.nbytes < sum(kept) < 1.3 * data.nbytes


# -- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_a_call_raises_ends_the_parallel_as_it_is(platform):
    from own_calls import Refused, Unreadable

    def refuses(n):
        if n == 3:
            raise Refused(404, n)
        return n

    def leaves(n):
        raise SystemExit(n)

    def unreadable(n):
        raise Unreadable(lock=threading.Lock())

    with config(platform=platform, retries=0):
        with pytest.raises(Refused) as raised:
            Parallel()(delayed(refuses)(n) for n in range(20))
        assert raised.value.code == 404
        assert isinstance(raised.value.__cause__, TaskFailed)
        assert "in refuses" in raised.value.__cause__.traceback
        with pytest.raises(TaskFailed, match="Unreadable: cannot be pickled"):
            Parallel()(delayed(unreadable)(n) for n in range(20))
        with pytest.raises(TaskFailed, match="SystemExit"):
            Parallel()(delayed(leaves)(n) for n in range(20))
        assert Parallel()(delayed(refuses)(n) for n in range(3)) == [0, 1, 2]


def test_what_goes_wrong_before_a_call_is_made():
    def calls():
        yield from (delayed(abs)(n) for n in range(9))
        raise KeyError("of the iterable")

    def locked():
        yield from (delayed(str)(n) for n in range(9))
        yield delayed(str)(threading.Lock())

    with config():
        with pytest.raises(KeyError, match="of the iterable"):
            Parallel()(calls())
        with pytest.raises(JobError, match=r"^an argument of str cannot be sent to a function: TypeError: cannot pickle"):
            Parallel()(locked())
        assert Parallel()(delayed(abs)(n) for n in range(2)) == [0, 1]


@pytest.mark.slow
def test_a_call_that_takes_too_long_and_one_that_does_not_wait():
    with config(platform="local"):
        with pytest.raises(multiprocessing.TimeoutError):
            Parallel(timeout=0.5)(delayed(time.sleep)(60) for _ in range(2))
        generator = Parallel(return_as="generator", pre_dispatch=1)(delayed(time.sleep)(n) for n in (0, 60, 60))
        assert next(generator) is None
        with pytest.warns(UserWarning, match="cancelled"):
            generator.close()
        assert Parallel()(delayed(abs)(n) for n in range(2)) == [0, 1]


def busy(seconds):
    ends_at = time.thread_time() + seconds
    while time.thread_time() < ends_at:
        pass


@pytest.mark.parametrize("n_jobs", [2, 3])
def test_a_budget_is_that_of_the_context(n_jobs):
    with config(budget_usd=2e-4):
        with pytest.raises(BudgetReached, match=r"budget of \$0\.0002"):
            Parallel()(delayed(busy)(0.02) for _ in range(300))
        with pytest.raises(BudgetReached, match=r"budget of \$0\.0002"):
            Parallel(n_jobs=n_jobs)(delayed(abs)(n) for n in range(3))
    assert len(folders.all_runs()) == 1


@pytest.mark.slow
def test_a_function_that_is_killed_is_replaced_and_its_calls_are_made_again(tmp_path):
    from own_calls import fatal_once

    with functions(platform="local") as pool:
        assert Parallel()(delayed(fatal_once)(n, str(tmp_path / "mark")) for n in range(8)) == list(range(8))
    assert pool.bill().invocations >= 2
    assert (tmp_path / "mark").exists()


INTERRUPTED = """
import sys, time
import joblib
import ephemeron.joblib

def waits(mark):
    open(mark, "w").close()
    time.sleep(300)

ephemeron.joblib.register()
with joblib.parallel_config("ephemeron", n_jobs=2):
    joblib.Parallel()(joblib.delayed(waits)(sys.argv[1]) for n in range(4))
"""


@pytest.mark.slow
def test_an_interruption_cancels_what_is_left_and_ends_the_functions(tmp_path):
    mark = tmp_path / "mark"
    program = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(mark)], stderr=subprocess.PIPE, text=True)
    while not mark.exists():
        assert program.poll() is None
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=100)
    assert said.rstrip().endswith("KeyboardInterrupt")
    [folder] = folders.all_runs()
    assert read_summary(folder).status == "stopped"
    assert not folder.objects.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": 512}, r"memory = 512 is no option of functions; did you mean memory_mb\?"),
        ({"plattform": "local"}, r"did you mean platform\?"),
        ({"max_workers": 4}, "max_workers = 4 is no option of joblib; n_jobs says how many functions run at once"),
        ({"pool": 3}, "pool = 3 is no FunctionExecutor"),
        ({"n_jobs": 10**6}, r"n_jobs = 1000000, and simulated runs 1000 functions at once"),
        ({"memory_mb": 1}, "memory_mb = 1 is outside 128 to 10240"),
        ({"platform": "moon"}, "platform 'moon' is not known"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_begins(options, said):
    with (
        pytest.raises(JobError, match=said),
        config(**options) if "pool" not in options else joblib.parallel_config("ephemeron", **options),
    ):
        Parallel()(delayed(abs)(n) for n in range(2))
    with pytest.raises(JobError, match=said):
        Parallel(**{"n_jobs": 2, "backend": "ephemeron", "platform": "simulated", **options})(delayed(abs)(n) for n in range(2))
    assert folders.all_runs() == []


def test_options_of_one_call_and_of_the_context():
    with config(retries=0):
        assert Parallel(backend="ephemeron", platform="simulated", memory_mb=512)(delayed(abs)(n) for n in range(2)) == [0, 1]
    with functions() as pool, pytest.raises(JobError, match="memory_mb and pool are both given"):
        joblib.parallel_config("ephemeron", pool=pool, memory_mb=512)
    for n_jobs in (0, -2):
        with pytest.raises(JobError, match=f"n_jobs = {n_jobs} is no number of functions"), functions(n_jobs=n_jobs):
            pass
    with pytest.raises(AssertionError, match="inner_max_num_threads"):
        config(inner_max_num_threads=2)
    assert EphemeronBackend(nesting_level=0).supports_return_generator


def test_without_joblib_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("ephemeron.integrations.joblib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "joblib", None)
    for missing in (ephemeron.joblib.register, functions().__enter__):
        with pytest.raises(MissingExtra, match=r"joblib is not installed; run: pip install 'ephemeron\[joblib\]'") as raised:
            missing()
        assert isinstance(raised.value, UserError)
