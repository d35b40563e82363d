"""A resumed run has the code as it is now, if its checkpoints fit."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from training_runs import configuration, make_job

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.keys import Keys
from ephemeron.errors import JobError
from ephemeron.events import Note, Progress
from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.runs.verbs import resume
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.launching.bundle_check import bundled
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.driver.renewal import differing, renewed
from ephemeron.training.job import Job, Target

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, {width}), 0

    def forward(self, x):
        self.calls += self.training
        if self.calls > {most}:
            raise ValueError("this has to be mended")
        return self.layer(x.flatten(1)){more}

def build():
    return Net()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mended", None)


def write(folder: Path, *, width: int = 10, most: int = 10**9, more: str = "") -> Job:
    (folder / "mended.py").write_text(MODEL.format(width=width, most=most, more=more))
    return make_job(model=Target(target="mended:build"), code=(folder,))


def asked(prepared, channel=None):
    """What `renewed` says of a run that has these objects."""

    async def go():
        store = MemoryChannel()
        await store.put(Keys("run").code, prepared.objects["run/code"])
        return await renewed(store, prepared.source, prepared.spec)

    return asyncio.run(go())


@pytest.fixture
def prepared(folder: Path):
    job = write(folder, most=3)
    return prepare(job, configuration(workers=2), run_id="run", limits=Limits(), prices=load_prices("objects"))


def test_the_same_code_is_sent_once(prepared) -> None:
    assert asked(prepared) is None


def test_what_has_changed_is_named_and_travels(prepared, folder: Path) -> None:
    write(folder)
    (folder / "words.txt").write_text("new")
    renewal = asked(prepared)
    assert renewal.changed == ("mended.py", "words.txt")
    assert str(renewal) == "code changed since it was sent: 2 files (mended.py, words.txt)"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"width": 11}, r"had layer.weight \[10, 64\] float32 where it has layer.weight \[11, 64\] float32"),
        ({"more": " + self.nothing\n    nothing = nn.Parameter("}, "code changed since it was sent: 1 file"),
    ],
)
def test_what_does_not_fit_or_cannot_be_built_is_refused(prepared, folder: Path, how, said) -> None:
    write(folder, **how)
    with pytest.raises(JobError, match=f"{said}.*--keep-code"):
        asked(prepared)


def test_a_folder_that_is_gone_is_refused(prepared, folder: Path) -> None:
    (folder / "mended.py").unlink()
    with pytest.raises(JobError, match=r"no module 'mended'.*--keep-code"):
        asked(prepared)
    folder.rename(folder.with_name("gone"))
    with pytest.raises(JobError, match="does not exist; resume with --keep-code"):
        asked(prepared)


@pytest.mark.slow
def test_a_mended_model_goes_on_where_it_failed(folder: Path, home: Path) -> None:
    job = write(folder, most=7)
    failed = train(job, configure(job, workers=1, aggregators=1, batch_size=120, checkpoint_every=3), check=False)
    assert failed.summary.status == "failed"
    assert "this has to be mended" in failed.causes[0]
    write(folder)
    events = []
    result = resume(failed.folder.run_id, on_event=events.append)
    assert result.finished
    assert "code changed since it was sent: 1 file (mended.py)" in [e.text for e in events if isinstance(e, Note)]
    again = [e.iteration for e in events if isinstance(e, Progress) and e.attempt > 0]
    assert again[0] in (3, 6), "from its newest checkpoint"
    assert differing((result.folder.path / "code.zip").read_bytes(), bundled(job)) == (), "what a model is built from later"
