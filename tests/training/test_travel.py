"""What a model needs travels with it, or the job is refused before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from training_runs import configuration, make_job

from ephemeron.config.code_bundle import unbundle
from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError
from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.training.driver.launching.bundle_check import bundled, check_bundle
from ephemeron.training.driver.launching.prepare import Prepared, prepare
from ephemeron.training.job import Job, Target

MODEL = """
from pathlib import Path
from safetensors.torch import load_file
from torch import nn

def build(where=None):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model.load_state_dict(load_file({path}))
    return model
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A job's folder, the working folder too, as users have it."""
    place = tmp_path / "job"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield place
    for name in set(sys.modules) - before:
        if name.startswith(("beside", "helper")):
            del sys.modules[name]


def job_in(folder: Path, path: str = "Path(__file__).parent / 'init.safetensors'", *, at: str = "init.safetensors", **more) -> Job:
    (folder / "beside.py").write_text(MODEL.format(path=path))
    weights = {"1.weight": torch.full((10, 64), 0.25), "1.bias": torch.zeros(10)}
    (folder / at).parent.mkdir(exist_ok=True)
    save_file(weights, folder / at)
    return make_job(model=Target(target="beside:build"), code=(folder,), **more)


def ready(job: Job) -> Prepared:
    return prepare(job, configuration(workers=2), run_id="run", limits=Limits(), prices=load_prices("objects"))


def test_weights_beside_the_model_travel(folder: Path, tmp_path: Path) -> None:
    code = ready(job_in(folder)).objects["run/code"]
    folders = unbundle(bytes(code[0]), tmp_path / "elsewhere")
    model = resolve("beside:build", folders)()
    assert model[1].weight[0, 0] == 0.25
    assert Path(sys.modules["beside"].__file__).is_relative_to(tmp_path / "elsewhere")


@pytest.mark.slow
def test_what_stays_behind_is_named_and_can_be_included(folder: Path) -> None:
    job = job_in(folder, "Path(__file__).parent / 'data' / 'init.safetensors'", at="data/init.safetensors")
    with pytest.raises(
        JobError, match=r"not from the files that are sent to the functions.*left out: .*data/init.safetensors.*code_include"
    ) as e:
        ready(job)
    assert "\n" not in str(e.value)
    ready(make_job(model=job.model, code=job.code, code_include=("data/*.safetensors",)))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["'init.safetensors'", "Path.cwd() / 'init.safetensors'"])
def test_a_file_of_the_working_folder_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(JobError, match=r"not from the files that are sent to the functions: .*relative to __file__"):
        ready(job_in(folder, path))


def test_a_module_that_only_the_client_has_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper_of_mine.py").write_text("x = 1")
    sys.path.append(str(tmp_path / "lib"))
    job = job_in(folder)
    (folder / "beside.py").write_text("import helper_of_mine\n" + (folder / "beside.py").read_text())
    ready(job)  # an entry of sys.path may be an installed one: only the working folder and the job's are known not to be
    (folder / "helper_of_cwd.py").write_text("x = 1")
    (folder / "beside.py").write_text("import helper_of_cwd\n" + (folder / "beside.py").read_text())
    with pytest.raises(JobError, match="helper_of_cwd"):
        ready(make_job(model=job.model, code=job.code, code_exclude=("helper_of_cwd.py",)))


def test_code_that_a_process_can_import_only_once_is_no_obstacle(folder: Path) -> None:
    job = job_in(folder)
    once = "import torch\ntorch.library.define('tiny_once::op', '(Tensor x) -> Tensor')\n"
    (folder / "beside.py").write_text(once + (folder / "beside.py").read_text())
    ready(job)


def test_nothing_of_the_trial_remains(folder: Path) -> None:
    job = job_in(folder)
    before = resolve(job.model.target, job.code)
    path, here = list(sys.path), os.getcwd()
    check_bundle(job, bundled(job))
    assert (sys.path, os.getcwd()) == (path, here)
    assert resolve(job.model.target, job.code) is before
