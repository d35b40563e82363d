"""Folders of runs on this machine: `HOME/runs/RUN/`, with `HOME` from EPHEMERON_HOME or `~/.ephemeron`.

signing.key     the run's key, with which its objects are signed; only its owner can read it
run.json        what was launched, and where (`header.RunHeader`): enough to attach and resume
events.jsonl    everything that happened
result.json     the summary that `--json` prints
weights.safetensors   the trained parameters and buffers
outputs/        files that the program of worker 0 has written below `output_dir`
report.html, report.png
job.json, code.zip    the job, and the code that its functions have: enough to build the model again
loggers.json    under which ids loggers know the run, and how far it is logged
plan.json, profile.json   what it was planned with, if it was planned
objects/        the channel, where it is a folder
groups/         folders like this one of the groups of functions, where there are several
trials/         links to the runs of a study's trials, by their numbers
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ephemeron.communication.signing import SigningKey, create_key, read_key
from ephemeron.config.paths import home as home
from ephemeron.config.paths import present
from ephemeron.errors import JobError, RunNotFound, UserError
from ephemeron.events import Event, RunStarted, from_json

KEY_FILE = "signing.key"
RUN_FILE, RESULT_FILE = "run.json", "result.json"
PROGRESS_FILE = "progress.json"
"""Tasks of an executor that are over, and all of them, as its client writes it while it runs."""
PLAN_FILE, PROFILE_FILE = "plan.json", "profile.json"
GROUPS = "groups"
"""Folder of the regions of a run, and the platform of its header in earlier releases."""
TRIALS = "trials"
MODELS = ("training", "regions", "sparse")
"""Kinds of runs that train a model."""
JOB_FILE, CODE_FILE = "job.json", "code.zip"
PREPARED = "prepared"
"""Folder with the manifest and the pipeline of the prepared dataset that a run trains on."""


def new_run_id(job: str) -> str:
    """A unique name for a run, fit for keys and file names."""
    safe = "".join(c if c.isascii() and c.isalnum() else "-" for c in job.lower()).strip("-")[:24] or "run"
    return f"{safe}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's files."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def objects(self) -> Path:
        return self.path / "objects"

    @property
    def outputs(self) -> Path:
        return self.path / "outputs"

    @property
    def weights(self) -> Path:
        return self.path / "weights.safetensors"

    def kept_weights(self, iteration: int) -> Path:
        """File with the weights of an evaluation that are kept."""
        return self.path / f"weights-{iteration:09d}.safetensors"

    def all_kept(self) -> list[Path]:
        """Files with weights that evaluations have kept, oldest first."""
        return sorted(self.path.glob("weights-*.safetensors"))

    @property
    def groups(self) -> list[RunFolder]:
        """Folders of the run's groups of functions, by name; empty: it is one group."""
        return [RunFolder(path) for path in sorted((self.path / GROUPS).glob("*/")) if (path / "run.json").exists()]

    @property
    def trials(self) -> list[tuple[int, RunFolder]]:
        """Trials of a study that have a run: number and folder, in the order of their numbers."""
        found = ((int(path.name), RunFolder(path)) for path in (self.path / TRIALS).glob("*/") if path.name.isdecimal())
        return sorted((each for each in found if (each[1].path / RUN_FILE).is_file()), key=lambda each: each[0])

    def create_key(self, parent: str = "") -> SigningKey:
        """A new key for a new run.

        Args:
            parent: its study. From the key of that, if it has one, this one is derived, so that functions that drive the study know it.
        """
        try:
            key = read_key(runs_folder() / parent / KEY_FILE).derived(self.run_id) if parent else None
        except OSError:
            key = None
        return create_key(self.path / KEY_FILE, key)

    def signing_key(self) -> SigningKey:
        """The run's key.

        Raises:
            UserError: the folder has none.
        """
        try:
            return read_key(self.path / KEY_FILE)
        except OSError as e:
            raise UserError(
                f"run {self.run_id} has no readable {KEY_FILE} ({e.strerror}): its objects cannot be verified; train again"
            ) from None

    def write(self, name: str, value: Mapping[str, object]) -> None:
        """Replaces a JSON file as a whole."""
        target = self.path / name
        part = target.with_suffix(".part")
        part.write_text(json.dumps(value, indent=2) + "\n")
        part.replace(target)

    def read(self, name: str) -> Mapping[str, object] | None:
        """The table in a JSON file; None where there is no such file, or no table in it."""
        try:
            value = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None


def runs_folder() -> Path:
    """Folder of all runs. It need not exist."""
    return home() / "runs"


def create(run_id: str, place: Path | None = None) -> RunFolder:
    """A new run's folder, in that of all runs, or in `place`.

    Raises:
        JobError: the home folder cannot be written.
    """
    path = (place or runs_folder()) / run_id
    try:
        path.mkdir(parents=True, exist_ok=False)
    except OSError as e:
        raise JobError(f"cannot make {path}: {e.strerror}", remedy="set EPHEMERON_HOME to a folder you can write") from None
    return RunFolder(path)


def find(run_id: str, *, kinds: Collection[str] = ()) -> RunFolder:
    """A run by its name, by an unambiguous beginning of it, or `last`: the newest that has begun.

    A beginning that a study shares with its trials is the study.

    Args:
        run_id: of the run.
        kinds: of which `last` is; empty: of any.

    Raises:
        RunNotFound: none, or more than one.
    """
    everything = all_runs()
    if run_id == "last" and kinds:
        everything = [r for r in everything if (r.read(RUN_FILE) or {}).get("kind", kinds) in (*kinds, kinds)]
    if run_id == "last" and everything:
        return next((r for r in everything if r.events.exists()), everything[0])
    matches = [r for r in everything if r.run_id == run_id] or [r for r in everything if r.run_id.startswith(run_id)]
    if len(matches) > 1:
        names = {r.run_id for r in matches}
        matches = [r for r in matches if (r.read(RUN_FILE) or {}).get("parent") not in names]
    if len(matches) == 1:
        return matches[0]
    known = ", ".join(r.run_id for r in (matches or everything)[:5]) or "none yet"
    if run_id == "last" and kinds:
        raise RunNotFound(f"no run in {runs_folder()} has trained a model yet")
    problem = "is ambiguous" if matches else f"is not in {runs_folder()}"
    raise RunNotFound(f"run {run_id!r} {problem}; runs: {known}")


def all_runs() -> list[RunFolder]:
    """All runs, newest first."""
    found = present(runs_folder().glob("*/run.json"))
    return [RunFolder(path.parent) for path, _ in sorted(found, key=lambda each: each[1].st_mtime_ns, reverse=True)]


def events_of(folder: RunFolder) -> Iterator[Event]:
    """Events of a run. Lines that are cut off or of another release are skipped."""
    with folder.events.open() as lines:
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                yield from_json(line)


def session_of(folder: RunFolder) -> float:
    """`wall_time` of the latest launch or resume."""
    return max((e.wall_time for e in events_of(folder) if isinstance(e, RunStarted)), default=0.0)


def last_t(folder: RunFolder) -> float:
    """Time of a run's latest event."""
    return max((e.t for e in events_of(folder)), default=0.0)
