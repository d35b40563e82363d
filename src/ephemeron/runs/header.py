"""`run.json`: what listing, cost, status, attaching, resuming and cleanup need to know of a run of any kind. Holds no secrets.

A record of another release may not be readable. It is then treated as absent where runs are listed, and refused by name where a run
is to be attached to or resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, RunNotFound
from ephemeron.events import RunStarted
from ephemeron.prices import UNKNOWN, Prices
from ephemeron.runs.folders import RUN_FILE, RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What every run has."""

    run_id: str
    kind: str
    """Name of its kind, see `runs.kinds`."""
    name: str = ""
    """Of the job, the study or the function."""
    platform: str
    """Of its functions; of several, joined by `+`."""
    channel: str = ""
    """Address of the channel, without credentials."""
    functions: int = 0
    """At once, at its start."""
    memory_mb: int = 0
    """Of a function; 0: the deployed function's own."""
    lifetime_s: float = 0.0
    """Time limit of an invocation; 0: the deployed function's own."""
    servers: int = 0
    """Machines beside the functions that are paid by the hour, such as parameter servers."""
    prices: Prices = UNKNOWN
    budget_usd: float | None = None
    deadline_s: float | None = None
    """Longest duration that the user wants."""
    started_at: float = 0.0
    """Unix time of the run's t = 0."""
    parent: str = ""
    """Run of which this is a part: its study, or its regions."""
    ends_with_client: bool = False
    """Whether nobody can go on with it when its client has ended."""
    detached: str = ""
    """Launch of the functions that drive it (`runs.detached`); "": a client does."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """See `runs.labels`."""
    command: str = ""
    """Command line that began it (`runs.origin`); empty: not known."""
    commit: str = ""
    """Git commit of its code; empty: it has none."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of the cloud; empty on other platforms."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What its kind adds."""


def started(header: RunHeader, *, t: float, wall_time: float, notes: Sequence[str] = ()) -> RunStarted:
    """The first event of a run without iterations, and of each time that it is gone on with.

    Args:
        header: of the run.
        t: seconds of the run.
        wall_time: Unix time.
        notes: for the reader.
    """
    h = header
    return RunStarted(
        t=t,
        run_id=h.run_id,
        job=h.name,
        workers=h.functions,
        aggregators=0,
        memory_mb=h.memory_mb,
        iterations=0,
        epochs=0,
        samples=0,
        platform=h.platform,
        wall_time=wall_time,
        notes=list(notes),
    )


def write_header(folder: RunFolder, header: RunHeader) -> None:
    """Replaces `run.json` as a whole."""
    folder.write(RUN_FILE, plain(header))


def read_header(folder: RunFolder) -> RunHeader | None:
    """A run's header; None where there is none that can be read."""
    try:
        return open_header(folder)
    except (JobError, RunNotFound):
        return None


def open_header(folder: RunFolder) -> RunHeader:
    """A run's header.

    Raises:
        RunNotFound: there is none.
        JobError: it is of another release.
    """
    raw = folder.read(RUN_FILE)
    if raw is None:
        raise RunNotFound(f"run {folder.run_id!r} has no readable {RUN_FILE}")
    return build(RunHeader, raw if "kind" in raw else _from_record(raw), where=f"{RUN_FILE} of {folder.run_id}")


def _from_record(raw: Mapping[str, Any]) -> Mapping[str, object]:
    """A header from the record of a training run of releases before there were kinds."""
    spec = raw.get("spec") or {}
    c, sparse = spec.get("configuration") or {}, spec.get("sparse")
    kind = "regions" if raw.get("platform") == "groups" else "training" if sparse is None else "sparse"
    platforms = dict.fromkeys(str(group.get("platform") or c.get("platform")) for group in c.get("groups") or ())
    shards = 0 if sparse is None or sparse["spec"].get("store") else sparse["spec"].get("shards", 0)
    return {
        "run_id": raw.get("run_id"),
        "kind": kind,
        "name": raw.get("job", ""),
        "platform": "+".join(platforms) or raw.get("platform"),
        "channel": raw.get("address", ""),
        "functions": raw.get("workers", 0),
        "memory_mb": c.get("memory_mb", 0),
        "lifetime_s": c.get("function_timeout_s", 0.0),
        "servers": shards
        if sparse is not None
        else int(str(c.get("channel", "")).removeprefix("direct+").startswith(("ps://", "parameter_server"))),
        "prices": spec.get("prices") or plain(UNKNOWN),
        "budget_usd": spec.get("budget_usd"),
        "deadline_s": spec.get("deadline_s"),
        "started_at": raw.get("wall_time", 0.0),
        "settings": raw.get("settings") or {},
        "payload": {"spec": spec, "source": raw.get("source")},
    }
