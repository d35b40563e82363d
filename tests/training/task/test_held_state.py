"""What a program holds beside its model: random generators of its own and files, which a replacement has, too."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from script_runs import LOOP, run, script, trials_once  # noqa: E402, F401
from training_runs import WORLD, configuration, real  # noqa: E402

import ephemeron  # noqa: E402
from ephemeron.errors import JobError  # noqa: E402
from ephemeron.events import FaultFired, Note  # noqa: E402
from ephemeron.functions.base import Limits  # noqa: E402
from ephemeron.prices import load_prices  # noqa: E402
from ephemeron.runs.folders import events_of  # noqa: E402
from ephemeron.training.driver.launching.prepare import prepare  # noqa: E402
from ephemeron.training.driver.launching.programs import job_of  # noqa: E402
from ephemeron.training.job import parse_fault  # noqa: E402
from ephemeron.training.task.outputs import PREFIX, Outputs, write_files  # noqa: E402

CODE = Path(__file__).parent / "code"
KILLS = ["kill:rank=0,iteration=3,phase=compute", "kill:rank=1,iteration=5,phase=compute"]


@pytest.fixture(autouse=True)
def importable(monkeypatch, home):
    monkeypatch.syspath_prepend(str(CODE))


def trained(name, *, faults=(), **more):
    made = dataclasses.replace(job_of(f"holding:{name}", {"epochs": 3}), simulation=WORLD, code=(CODE,))
    how = {"workers": 2, "aggregators": 2, "batch_size": 8, "checkpoint_every": 2, **more}
    found = real(made, faults=list(map(parse_fault, faults)), **how)
    assert found.ending.status == "finished", found.ending.causes
    assert len(found.of(FaultFired)) == len(faults)
    return found


@pytest.mark.parametrize("name", ["Draws", pytest.param("DrawsAtTheEnd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_replacement_has_the_tasks_own_random_generators(name, workers):
    how = {"workers": workers, "aggregators": workers, "batch_size": 16 // workers}
    assert trained(name, faults=KILLS[:workers], **how).sha == trained(name, **how).sha


@pytest.mark.slow
def test_generators_survive_a_kill_among_local_steps():
    more = {"exchange": {"quantity": "parameters", "local_steps": 2}}
    assert trained("Draws", faults=KILLS[:1], **more).sha == trained("Draws", **more).sha


def texts(found):
    return {name.removeprefix(PREFIX): array.tobytes() for name, array in found.ending.files.items()}


@pytest.mark.slow
def test_files_below_output_dir_are_collected_and_survive_a_kill():
    undisturbed = texts(trained("Writes"))
    steps = undisturbed["steps.txt"].decode().split()
    assert steps == [str(i + 1) for i in range(len(steps))]
    assert set(undisturbed) == {"steps.txt", "more/last.pt"}
    assert texts(trained("Writes", faults=KILLS)) == undisturbed  # each line once
    assert texts(trained("Writes", function_timeout_s=4.0)) == undisturbed  # hand-offs


def test_a_program_that_collects_nothing_has_no_files():
    found = trained("Draws")
    assert found.ending.files == {}
    assert not any(name.startswith(PREFIX) for name in found.ending.arrays)


def test_more_than_is_collected_is_an_error():
    made = dataclasses.replace(job_of("holding:WritesTooMuch", {"epochs": 3}), simulation=WORLD, code=(CODE,))
    with pytest.raises(JobError, match=r"written 68\.2 MB below output_dir, and at most 67\.1 MB are collected"):
        real(made, workers=1, batch_size=16, aggregators=1)


def test_a_copy_has_a_folder_of_its_own():
    import pickle

    outputs = Outputs()
    (outputs.folder / "a").write_text("a")
    other = pickle.loads(pickle.dumps(outputs))
    assert other.folder != outputs.folder
    other.load(outputs.files())
    assert (other.folder / "a").read_text() == "a"
    other.load({})
    assert not list(other.folder.iterdir())
    with pytest.raises(JobError, match=r"file \.\./a is not in output_dir"):
        write_files(other.folder, {f"{PREFIX}../a": outputs.files()[f"{PREFIX}a"]})


def test_files_and_folders_that_a_program_has_opened_stay_its_own_when_a_state_is_loaded():
    outputs, other = Outputs(), Outputs()
    for each in (outputs, other):
        (each.folder / "pictures").mkdir()
    (outputs.folder / "log.csv").write_text("1\n")
    with (other.folder / "log.csv").open("a") as log:
        other.load(outputs.files())
        log.write("2\n")
    assert (other.folder / "log.csv").read_text() == "1\n2\n"
    assert (other.folder / "pictures").is_dir()
    other.load({f"{PREFIX}pictures/log.csv/a": outputs.files()[f"{PREFIX}log.csv"]})
    assert not (other.folder / "log.csv").exists()
    other.load({f"{PREFIX}pictures": outputs.files()[f"{PREFIX}log.csv"]})
    assert (other.folder / "pictures").read_text() == "1\n"


def test_a_task_with_an_attribute_of_this_name_keeps_it():
    class Own(ephemeron.Task):
        def __init__(self):
            self.output_dir = "mine"

    assert Own().output_dir == "mine"


@pytest.mark.parametrize(
    ("name", "text"),
    [("Counts", r"self.seen (int), self.teacher (Linear) change while the task trains"), ("Saves", ""), ("Draws", ""), ("Writes", "")],
)
def test_state_that_no_checkpoint_has_is_named_before_the_run(name, text):
    made = dataclasses.replace(job_of(f"holding:{name}", {"epochs": 3}), simulation=WORLD, code=(CODE,))
    notes = prepare(made, configuration(workers=2), run_id="run", limits=Limits(), prices=load_prices("objects")).notes
    assert [note for note in notes if "begins with the first value" in note] == [n for n in notes if text and text in n]
    assert bool(text) == any(text and text in note for note in notes)


WRITES = (
    LOOP
    + """
    with open(run.output_dir / "losses.txt", "a") as log:
        print(run.iteration, file=log)
torch.save(model.state_dict(), run.output_dir / "end.pt")
"""
)


@pytest.mark.slow
def test_files_of_a_script_are_collected_and_survive_a_kill(tmp_path):
    made = script(tmp_path, WRITES)
    undisturbed = run(2, script=made)
    files = texts(undisturbed)
    assert files["losses.txt"].decode().split() == [str(i + 1) for i in range(8)]
    assert "end.pt" in files
    assert texts(run(2, script=made, faults=KILLS))["losses.txt"] == files["losses.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["task", "script"])
def test_local_functions_collect_files_and_name_those_that_are_lost(kind, tmp_path):
    lost = 'open("lost.txt", "w").write("x")'
    options = {"workers": 2, "aggregators": 2, "checkpoint_every": 2, "faults": list(map(parse_fault, KILLS[:1]))}
    if kind == "task":
        from holding import Loses

        result = ephemeron.train(Loses, epochs=3, batch_size=8, out=tmp_path / "out", **options)
        names, named, remedy = ["kept.pt"], "out/ckpt.pt", "self.output_dir"
    else:
        result = ephemeron.train(script(tmp_path, WRITES + lost), out=tmp_path / "out", **options)
        names, named, remedy = ["end.pt", "losses.txt"], "lost.txt", "ephemeron.current().output_dir"
    assert result.finished
    for folder in (result.output_dir, tmp_path / "out" / "outputs"):
        assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == names
    notes = [e.text for e in events_of(result.folder) if isinstance(e, Note)]
    (note,) = [text for text in notes if "deleted with the function" in text]
    assert f"wrote {named} on rank 0, which is deleted with the function: write it below {remedy}" in note
