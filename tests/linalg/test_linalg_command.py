"""`ephemeron linalg`: a command that was interrupted goes on from its tiles, and removes what it has stored when it is over."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from ephemeron.cli.linalg.files import Source, command_name, source_of, stored
from ephemeron.cli.main import main
from ephemeron.config.typed import plain
from ephemeron.errors import JobError, SingularMatrix
from ephemeron.linalg import clean
from ephemeron.linalg.execution.claims import ProgramClaim
from ephemeron.linalg.matrices import tile_store
from gates import holding_results
from servers import wait_until

TILES = [(4, 4), (4, 4)]
NAME = "command-0123456789abcdef"


class Inputs:
    """Two matrices in files, and a folder for their tiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"
        self.store = self.folder.as_uri()
        self.paths = [folder / "a.npy", folder / "b.npy"]
        self.reads = 0
        for path in self.paths:
            np.save(path, np.arange(64.0).reshape(8, 8))

    def __call__(self) -> Any:
        """`stored`, of sources that count how often they are read."""

        def counting(source: Source) -> Source:
            def read(**options: Any) -> Any:
                self.reads += 1
                return source.store(**options)

            return Source(source.shape, source.dtype, read)

        pool: Any = SimpleNamespace(queue=("memory", "map-1"))
        sources = [counting(source_of(path)) for path in self.paths]
        return stored(sources, TILES, store=self.store, name=NAME, pool=pool)

    @property
    def files(self) -> set[str]:
        """Paths, without the generations of matrices."""
        paths = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        return {re.sub(r"/[0-9a-f]{16}\.(\d+\.\d+)$", r"/\1", path) for path in paths}


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    return Inputs(tmp_path)


def test_inputs_go_when_the_command_is_over(inputs):
    with inputs() as (a, b):
        np.testing.assert_array_equal(a.to_numpy(), b.to_numpy())
        assert f"{NAME}-0/1.1" in inputs.files
        assert f"{NAME}-temporary/running.map-1" in inputs.files
    assert inputs.files == set()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_inputs_stay_where_the_command_does_not_end(inputs, error):
    with pytest.raises(error), inputs():
        raise error
    assert inputs.reads == 2
    with inputs() as (a, _):
        assert inputs.reads == 2
        np.testing.assert_array_equal(a.to_numpy(), np.load(inputs.paths[0]))
    assert inputs.files == set()


def test_inputs_that_are_refused_go(inputs):
    with pytest.raises(SingularMatrix), inputs():
        raise SingularMatrix("no inverse", kernel="lu")
    assert inputs.files == set()


def test_an_input_that_was_not_read_to_its_end_is_read_again(inputs):
    with pytest.raises(KeyboardInterrupt), inputs():
        raise KeyboardInterrupt
    (inputs.folder / f"{NAME}-1" / "matrix.json").unlink()
    next((inputs.folder / f"{NAME}-1").glob("*.1.1")).unlink()
    with inputs() as (_, b):
        assert inputs.reads == 3
        np.testing.assert_array_equal(b.to_numpy(), np.load(inputs.paths[1]))


def claim(inputs: Inputs, *, process: int, process_began: float) -> None:
    """Puts the claim of another process."""
    found = ProgramClaim(queue="map-2", channel="memory", host=platform.node(), process=process, process_began=process_began, began=2.0)

    async def put() -> None:
        async with tile_store.opened(inputs.store) as channel:
            await channel.put(f"{NAME}-temporary/running.map-2", [json.dumps(plain(found)).encode()])

    asyncio.run(put())


def test_the_same_command_of_another_living_process_is_refused(inputs):
    with pytest.raises(KeyboardInterrupt), inputs():
        raise KeyboardInterrupt
    other = psutil.Process(os.getppid())
    claim(inputs, process=other.pid, process_began=other.create_time())
    with pytest.raises(JobError, match=rf"runs already over .*, as process {other.pid}"), inputs():
        pass
    assert f"{NAME}-0/1.1" in inputs.files


def test_a_command_of_a_dead_process_goes_on(inputs):
    with pytest.raises(KeyboardInterrupt), inputs():
        raise KeyboardInterrupt
    claim(inputs, process=os.getppid(), process_began=1.0)
    with inputs():
        assert inputs.reads == 2
    assert inputs.files == set()


def test_the_name_follows_command_files_and_tiles(inputs):
    name = command_name("solve", inputs.paths, TILES)
    assert name == command_name("solve", inputs.paths, TILES)
    others = {
        name,
        command_name("lstsq", inputs.paths, TILES),
        command_name("solve", inputs.paths[::-1], TILES),
        command_name("solve", inputs.paths, [(4, 4), (4, 2)]),
    }
    folder = inputs.paths[0].with_suffix(".zarr")
    folder.mkdir()
    others.add(command_name("solve", [folder], TILES))
    (folder / "0.0").write_bytes(b"x")
    others.add(command_name("solve", [folder], TILES))
    times = inputs.paths[0].stat()
    np.save(inputs.paths[0], np.zeros((8, 8)))  # of the same size, and said to be as old
    os.utime(inputs.paths[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    others.add(command_name("solve", inputs.paths, TILES))
    assert len(others) == 7


def test_inputs_of_an_interrupted_command_are_removed_with_unfinished_results(inputs):
    with pytest.raises(KeyboardInterrupt), inputs():
        raise KeyboardInterrupt
    (found,) = clean(inputs.store)
    assert (found.program, found.unfinished, found.are_inputs) == (NAME, 8, True)
    told = CliRunner().invoke(main, ["linalg", "clean", inputs.store], input="n\n")
    assert f"{NAME}: 0 temporary tiles, 8 tiles of inputs" in told.output
    clean(inputs.store, dry_run=False)
    assert f"{NAME}-0/1.1" in inputs.files
    clean(inputs.store, dry_run=False, results=True)
    assert inputs.files == set()


def test_a_prediction_needs_no_place_for_results(inputs):
    run = CliRunner().invoke
    told = run(main, ["linalg", "cholesky", str(inputs.paths[0]), "--dry-run", "--tile", "1"])
    assert told.exit_code == 0, told.output
    assert "120 tasks" in told.output
    assert "note: without --tile about" in told.output + told.stderr
    refused = run(main, ["linalg", "cholesky", str(inputs.paths[0])])
    assert refused.exit_code == 2
    assert "Missing option '--out'" in refused.output + refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_was_stopped_goes_on(tmp_path, number):
    rng = np.random.default_rng(0)
    g = rng.standard_normal((240, 240))
    np.save(tmp_path / "a.npy", g @ g.T + 240 * np.eye(240))
    store = tmp_path / "store"
    arguments = [
        "linalg",
        "cholesky",
        str(tmp_path / "a.npy"),
        "--out",
        str(tmp_path / "l.npy"),
        "--tile",
        "20",
        "--channel",
        store.as_uri(),
        "--json",
    ]
    process = subprocess.Popen(
        holding_results(*arguments), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    wait_until(lambda: bool(list(store.glob("cholesky-*-L/*"))), process, "the command")
    process.send_signal(number)
    told = process.communicate(timeout=120)[1].decode()
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, told
        assert "the same command goes on from its tiles" in told
    assert not (tmp_path / "l.npy").exists()
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["resumed"] > 0
    lower = np.load(tmp_path / "l.npy")
    np.testing.assert_allclose(lower @ lower.T, np.load(tmp_path / "a.npy"), rtol=1e-12, atol=1e-12 * 240)
    if number != signal.SIGKILL:  # whose functions may go on for a while
        assert not [path for path in store.glob("c*/**/*") if path.is_file()]


@pytest.mark.slow
def test_a_command_that_its_budget_has_stopped_goes_on(tmp_path):
    a = np.eye(240) + 1.0 / 240
    np.save(tmp_path / "a.npy", a)
    store = (tmp_path / "store").as_uri()
    arguments = ["linalg", "cholesky", str(tmp_path / "a.npy"), "--out", str(tmp_path / "l.npy"), "--tile", "20", "--channel", store]
    stopped = CliRunner().invoke(main, [*arguments, "--budget-usd", "0.0001"])
    told = stopped.output + stopped.stderr
    assert stopped.exit_code == 1
    assert "of 364 tasks are done, the rest is cancelled" in told
    assert f"the same command goes on from its tiles in {store}" in told
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    lower = np.load(tmp_path / "l.npy")
    np.testing.assert_allclose(lower @ lower.T, a, atol=1e-12)
