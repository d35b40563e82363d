"""Durable maps: beside other ways to call a function with many items, under kills, and given again.

    python -m benchmarks.durable_map [--json] [--parts beside,kills,groups,virtual,lambda,again]

`beside`: `ephemeron.maps.map_items`, `FunctionExecutor.map`, `ProcessPoolExecutor`, joblib (loky), Ray and dask on two workers. Each
measurement has a fresh process, which starts its side, calls one empty task (*first result*: seconds since the process was started), then
four tasks of the load for each worker, and then all of them, which is measured. Sides alternate within a load and a turn, in rotating order;
ratios are within turns. Busy tasks compute for so many seconds of CPU time, the others sleep, so that the processors' load counts where a
side causes work. `map_items` starts functions in each call, and ends them; the others have workers that are up. Results are
values in the client's hands, in order; they are checked. *Groups* are a regression of the rows of each group of a Parquet file, by
`fit_groups`, `groupby` of Ray Data and dask, and of pandas where a side has none.

`kills`: `ephemeron map` with items of 10 to 30 ms that sleep. A function or the client is killed (SIGKILL) whenever the functions have begun with so many items,
drawn at random; after the end of a client the command is given again. Functions log when they begin and end an item. *Recorded again* are items that
a function began after a client was started for which they had a row already. *Repeated* is what was computed beyond one call for each item.

`groups`: `ephemeron fit-groups` under kills like those, of a generated Parquet file (`--groups`, `--table-mb`) of random rows: a regression of each
group's rows with confidence intervals by the bootstrap. Killed are functions and the client while groups are fitted.

`virtual`: functions of the simulated platform killed at random in virtual time (`durable_map_virtual`).

`lambda`: 200 functions of an emulated Lambda, with throttled and with duplicate invocations, and five times as many simulated ones, some of them killed.

`again`: the command given again with nothing changed, and with one item added. Tables of a first call, which calls an empty function with
each item (`--computed`), or, of larger sizes, written by the table's own code with the rows that a first call would have written.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

from benchmarks.common import ROOT, SEED, condensed, environment, write
from benchmarks.durable_map_lambda import on_lambda
from benchmarks.durable_map_sides import FUNCTIONS, items_of, sides
from benchmarks.durable_map_virtual import VirtualKills
from ephemeron.config.code_bundle import Selection
from ephemeron.maps.calls import inspect_callee
from ephemeron.maps.groups.models import GroupModels
from ephemeron.maps.result_table import ResultTable, Row
from ephemeron.maps.sources import ItemColumns, hex_of, open_source, scan

LIMIT_S = 600.0
"""Longest measurement of a side, and longest pause between two items under kills."""
CALL = """
import json, resource, sys
from ephemeron.cli.main import main
from ephemeron.config.own_processes import peak_mb
figures = sys.argv.pop(1)
try:
    main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open(figures, "w") as file:
        json.dump({"cpu_s": used.ru_utime + used.ru_stime, "peak_mb": peak_mb()}, file)
"""
"""A client that says what it took."""
KINDS = ("client", "function")
"""What is killed."""
ROWS_PER_SHARD = 20_000
"""As a client flushes them where functions are quick."""


# -- beside others ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Tasks that all sides compute."""

    name: str
    kind: str
    """See `durable_map_sides.items_of`."""
    count: int
    amount: float

    @property
    def least_s(self) -> float:
        """Seconds of all tasks."""
        return (
            0.0
            if self.kind in ("empty", "payload", "groups")
            else sum(seconds for _, seconds in items_of(self.kind, self.count, self.amount)[1])
        )


def loads_of(tasks: int, long_tasks: int, payloads: int, payload_mb: float, longest_s: float, groups: int, groups_mb: float) -> list[Load]:
    """All loads."""
    return [
        Load(name="empty", kind="empty", count=tasks, amount=0.0),
        Load(name="1 ms, busy", kind="busy", count=tasks, amount=0.001),
        Load(name="100 ms, busy", kind="busy", count=long_tasks, amount=0.1),
        Load(name="100 ms, sleeping", kind="sleep", count=long_tasks, amount=0.1),
        Load(name=f"Zipf up to {longest_s:g} s, sleeping", kind="skewed", count=tasks, amount=longest_s),
        Load(name=f"{payload_mb:g} MB in and out", kind="payload", count=payloads, amount=payload_mb),
        Load(name=f"groups of {groups_mb:g} MB", kind="groups", count=groups, amount=groups_mb),
    ]


def beside(loads: Sequence[Load], names: Sequence[str], turns: int, workers: int, place: Path) -> dict[str, Any]:
    """Figures of each side: of its start, and by load."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {load.name: [] for load in loads} for name in names}
    left_out: dict[str, str] = {}
    failed: dict[tuple[str, str], str] = {}
    for turn in range(turns):
        for load in loads:
            for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                if name in left_out or (name, load.name) in failed:
                    continue
                one = _once(name, load, workers, place)
                if "skipped" in one:
                    left_out[name] = one["skipped"]
                    continue
                if "failed" in one:
                    failed[name, load.name] = one["failed"]
                    continue
                found[name][load.name].append(one)
                print(f"{load.name}, {name}: {one['seconds']:.3f} s, CPU {one['cpu_s']:.2f} s", file=sys.stderr)
    there = [name for name in names if name not in left_out]
    starts = {name: [one for ones in found[name].values() for one in ones] for name in there}
    base = names[0]
    return {
        "workers": workers,
        "left_out": left_out,
        "first_result": {
            name: {
                "seconds": condensed([one["first_s"] for one in ones]),
                "cpu_s": condensed([one["first_cpu_s"] for one in ones]),
                "ratio": _ratio(ones, starts.get(base, []), "first_s"),
            }
            for name, ones in starts.items()
        },
        "loads": [
            {
                "load": load.name,
                "tasks": load.count,
                "bound_s": round(load.least_s / workers, 4),
                "sides": {
                    name: _figures(load, found[name][load.name], found[base][load.name], workers)
                    if (name, load.name) not in failed
                    else {"failed": failed[name, load.name]}
                    for name in there
                },
            }
            for load in loads
        ],
        "ratios_to": base,
    }


def _once(name: str, load: Load, workers: int, place: Path) -> dict[str, Any]:
    """Figures of one process."""
    options = ["--side", name, "--load", load.kind, "--count", str(load.count), "--amount", str(load.amount), "--workers", str(workers)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(place)])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.durable_map_sides", *options, "--folder", str(place)],
                env={**os.environ, "PYTHONPATH": paths, "EPHEMERON_HOME": home},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {LIMIT_S:g} s"}
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"failed": done.stderr.strip().rpartition("\n")[2][:300]}
    one: dict[str, Any] = json.loads(done.stdout)
    if "skipped" not in one:
        one["first_s"] = one["first_at"] - began
    return one


def _figures(load: Load, ones: Sequence[dict[str, float]], base: Sequence[dict[str, float]], workers: int) -> dict[str, Any]:
    seconds = [one["seconds"] for one in ones]
    own_s = load.least_s if load.kind == "busy" else 0.0
    row = {
        "seconds": condensed(seconds),
        "tasks_per_s": round(load.count / statistics.median(seconds), 1),
        "cpu_s": condensed([one["cpu_s"] for one in ones]),
        "overhead_cpu_ms": round(1000 * (statistics.median(one["cpu_s"] for one in ones) - own_s) / load.count, 3),
        "ratio": _ratio(ones, base, "seconds"),
        "cpu_ratio": _ratio(ones, base, "cpu_s"),
    }
    if load.least_s:
        row["times_bound"] = round(statistics.median(seconds) * workers / load.least_s, 3)
    if "from_first_row_s" in ones[0]:
        row["from_first_row_s"] = condensed([one["from_first_row_s"] for one in ones])
    return row


def _ratio(ones: Sequence[dict[str, float]], base: Sequence[dict[str, float]], what: str) -> float | None:
    """Median of the ratios within turns; None: the base is too small to tell."""
    pairs = [one[what] / other[what] for one, other in zip(ones, base, strict=False) if other[what] > 0]
    return round(statistics.median(pairs), 3) if pairs else None


# -- kills --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """A call of the function, from its log."""

    key: str
    pid: int
    began_at: float
    at: int
    """Position of its beginning in the log, in lines."""
    ended_at: float | None


@dataclass(slots=True)
class Log:
    """What functions have written, as far as it was read."""

    path: Path
    lines: list[tuple[str, str, int, float]] = field(default_factory=list)
    """Kind, key, process, time."""
    begun: int = 0
    _at: int = 0

    def read(self) -> None:
        """Reads on."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._at += len(data)
            for line in data.decode().splitlines():
                kind, key, pid, t = line.split()
                self.lines.append((kind, key, int(pid), float(t)))
                self.begun += kind == "begin"

    def calls(self) -> list[LoggedCall]:
        """All calls; of those of killed functions the end is not known."""
        ends = {(key, pid): t for kind, key, pid, t in self.lines if kind == "end"}
        return [LoggedCall(key, pid, t, at, ends.get((key, pid))) for at, (kind, key, pid, t) in enumerate(self.lines) if kind == "begin"]

    def living(self, killed: Container[int]) -> int | None:
        """A process that has begun with an item lately, and lives."""
        now = time.monotonic()
        for _, _, pid, t in reversed(self.lines[-100:]):
            if pid in killed or now - t > 1.0:
                continue
            with contextlib.suppress(psutil.Error):
                age_s = time.time() - psutil.Process(pid).create_time()
                if age_s > now - t:  # else another process has the number now
                    return pid
        return None


class Kills:
    """One map under kills.

    Args:
        items: of the map.
        points: at which something is killed.
        workers: functions.
        kinds: of what is killed.
        place: folder with the module of the functions.
    """

    table = "out.jsonl.results"
    """Folder of the results."""

    def __init__(self, items: int, points: int, workers: int, kinds: Sequence[str], place: Path) -> None:
        self._rng = random.Random(SEED)
        self._place, self._workers, self._items = place, workers, items
        self._log = Log(place / "calls.log")
        self._table = (place / self.table).as_uri()
        self._recorded_at: dict[str, int] = {}
        """Lines of the log when a row of the key was first seen before a client began."""
        chosen = [kinds[n % len(kinds)] for n in range(points)]
        self._rng.shuffle(chosen)
        self._points = list(zip(sorted(self._rng.randrange(items) for _ in range(points)), chosen, strict=True))
        self._killed: dict[int, float] = {}
        """Time, by function."""
        self.kills: Counter[str] = Counter()
        self.clients = 0
        self.ended_early: list[str] = []
        self._keys = [f"k{n:07d}" for n in range(items)]
        self._prepare()

    def _prepare(self) -> None:
        """Writes the items."""
        with (self._place / "items.jsonl").open("w") as file:
            for key in self._keys:
                item = {"key": key, "seconds": round(self._rng.uniform(0.01, 0.03), 6), "log": str(self._log.path)}
                file.write(json.dumps(item) + "\n")

    @property
    def _command(self) -> list[str]:
        return ["map", f"{FUNCTIONS}:logged", "--items", "items.jsonl", "--key", "key", "--out", "out.jsonl"]

    def _is_right(self) -> bool:
        """Whether the command has written what it should."""
        return [json.loads(line) for line in (self._place / "out.jsonl").read_text().splitlines()] == [{"key": key} for key in self._keys]

    def run(self) -> dict[str, Any]:
        """The map until it ends."""
        began = time.monotonic()
        client = self._client()
        for position, kind in self._points:
            client = self._until(position, client)
            if client.poll() is not None:
                break
            time.sleep(self._rng.uniform(0.0, 0.05))
            if kind == "client":
                client.kill()
                client.wait()
                self.kills["client"] += 1
                time.sleep(self._rng.choice((0.0, 0.5, 3.0)))  # functions go on, and may end
                client = self._client()
            elif (pid := self._log.living(self._killed)) is not None:
                os.kill(pid, 9)
                self._killed[pid] = time.monotonic()
                self.kills["function"] += 1
        self._until(None, client)
        seconds = time.monotonic() - began
        self._log.read()
        found = self._judge()
        wrong = (found["keys_without_row"], found["keys_with_several_rows"], found["recorded_and_computed_again"])
        return {"is_right": found["output_is_right"] and not any(wrong), "seconds": round(seconds, 2), **found}

    def _client(self) -> subprocess.Popen[bytes]:
        """Gives the command."""
        self._log.read()
        for key in self._rows():
            self._recorded_at.setdefault(key, len(self._log.lines))
        self.clients += 1
        command = [sys.executable, "-P", "-m", "ephemeron.cli.main", *self._command, "--max-workers", str(self._workers), "--retries", "5"]
        with (self._place / "client.txt").open("ab") as said:
            return subprocess.Popen(command, cwd=self._place, stdout=said, stderr=said)

    def _until(self, position: int | None, client: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Waits until so many items were begun, or the map has ended. A command that ends early is given again."""
        heard_at = time.monotonic()
        while position is None or self._log.begun <= position:
            before = self._log.begun
            self._log.read()
            if self._log.begun > before:
                heard_at = time.monotonic()
            if (status := client.poll()) is not None:
                if status == 0:
                    break
                self.ended_early.append((self._place / "client.txt").read_text().strip().splitlines()[-1])
                if len(self.ended_early) > 50:
                    raise RuntimeError(f"the command does not succeed: {self.ended_early[-1]}")
                client = self._client()
            if time.monotonic() - heard_at > LIMIT_S:
                client.kill()
                raise RuntimeError(f"nothing is computed for {LIMIT_S:g} s")
            time.sleep(0.003)
        return client

    def _rows(self) -> list[str]:
        table = ResultTable.open(self._table)
        return [key for rows in table.scan(("key",)) for key in rows.column(0).to_pylist()]

    def _judge(self) -> dict[str, Any]:
        calls = self._log.calls()
        rows = Counter(self._rows())
        again = [call for call in calls if call.at >= self._recorded_at.get(call.key, len(self._log.lines))]
        spent_s = {call: (call.ended_at or self._killed.get(call.pid) or call.began_at) - call.began_at for call in calls}
        useful: dict[str, LoggedCall] = {}
        for call in calls:  # the last one that ended: what came before was lost
            if call.ended_at is not None:
                useful[call.key] = call
        wasted = [call for call in calls if useful.get(call.key) is not call]
        of_killed = sum(call.pid in self._killed for call in wasted)
        return {
            "items": self._items,
            "workers": self._workers,
            "kills": dict(self.kills),
            "commands": self.clients,
            "ended_early": Counter(self.ended_early),
            "keys_without_row": len(set(self._keys) - rows.keys()),
            "keys_with_several_rows": sum(count > 1 for count in rows.values()),
            "output_is_right": self._is_right(),
            "recorded_and_computed_again": len(again),
            "calls": len(calls),
            "repeated": len(wasted),
            "repeated_share": round(len(wasted) / len(calls), 5),
            "repeated_seconds_share": round(sum(spent_s[call] for call in wasted) / sum(spent_s.values()), 5),
            "repeated_after_function_kills": of_killed,
            "repeated_otherwise": len(wasted) - of_killed,
            "computing_s": round(sum(spent_s.values()), 2),
        }


class GroupKills(Kills):
    """One fit of groups under kills.

    Args:
        table_mb: MB of the Parquet file.
        bootstraps: regressions of a group.
        items, points, workers, kinds, place: see `Kills`; items are groups.
    """

    table = "models"

    def __init__(
        self, items: int, points: int, workers: int, kinds: Sequence[str], place: Path, *, table_mb: float, bootstraps: int
    ) -> None:
        self._table_mb, self._bootstraps = table_mb, bootstraps
        super().__init__(items, points, workers, kinds, place)
        self._keys = [f"[{n}]" for n in range(items)]

    def _prepare(self) -> None:
        rows = write_groups(self._place / "rows.parquet", groups=self._items, nbytes=int(self._table_mb * 1e6))
        self.rows = rows
        with (self._place / f"{FUNCTIONS}.py").open("a") as file:
            file.write(f"\n\nLOG = {str(self._log.path)!r}\nBOOTSTRAPS = {self._bootstraps}\n")

    @property
    def _command(self) -> list[str]:
        return ["fit-groups", "rows.parquet", "--by", "group", "--fit", f"{FUNCTIONS}:regression", "--out", "models"]

    def _is_right(self) -> bool:
        models = GroupModels.open(self._place / "models")
        slopes = np.array([models[n]["slopes"] for n in range(0, self._items, max(1, self._items // 100))])
        return len(models) == self._items and bool(np.allclose(slopes, SLOPES, atol=0.2))


SLOPES = (1.0, -2.0, 0.5, 0.0)
"""Of the generated rows."""


def write_groups(path: Path, *, groups: int, nbytes: int) -> int:
    """Writes rows of random groups, about so many bytes; returns their number."""
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(SEED)
    rows, at_once = nbytes // 44, 500_000  # five columns of eight bytes, and the group
    schema = pa.schema([("group", pa.int32()), *((f"x{n}", pa.float64()) for n in range(len(SLOPES))), ("y", pa.float64())])
    with parquet.ParquetWriter(path, schema) as writer:
        for at in range(0, rows, at_once):
            count = min(at_once, rows - at)
            x = rng.standard_normal((count, len(SLOPES)))
            y = x @ np.array(SLOPES) + 0.5 * rng.standard_normal(count)
            writer.write_table(pa.table([rng.integers(0, groups, count, np.int32), *x.T.copy(), y], schema=schema))
    return rows


# -- given again --------------------------------------------------------------------------------------------------


def again(sizes: Sequence[int], computed: Sequence[int], turns: int, workers: int, place: Path) -> list[dict[str, Any]]:
    """Figures of the second call by number of items, and of the first one where it is made."""
    return [_again(size, size in computed, turns, workers, place / f"again-{size}") for size in sizes]


def _again(size: int, is_computed: bool, turns: int, workers: int, place: Path) -> dict[str, Any]:
    place.mkdir()
    (place / f"{FUNCTIONS}.py").write_bytes((ROOT / "benchmarks" / f"{FUNCTIONS}.py").read_bytes())
    with (place / "items.jsonl").open("w") as file:
        file.writelines(f'{{"key": "k{n:07d}", "x": {n}}}\n' for n in range(size))
    row: dict[str, Any] = {"items": size, "table": "of a first call" if is_computed else "written"}
    if is_computed:
        first = _call(place, workers)
        assert first["computed"] == size
        row["first"] = {
            **_chosen(first, "seconds", "cpu_s", "peak_mb", "gb_seconds", "cost_usd"),
            "cpu_us_per_item": round(1e6 * first["cpu_s"] / size, 1),
            "us_per_item": round(1e6 * first["seconds"] / size, 1),
            "usd_per_million_items": round(1e6 * first["cost_usd"] / size, 4),
        }
    else:
        fill(place)
        row["rows_found"] = _chosen(_nothing(place, workers), "seconds", "cpu_s", "peak_mb")  # it is not known yet that none is missing
    ones = [_nothing(place, workers) for _ in range(turns)]
    row["again"] = {name: condensed([one[name] for one in ones]) for name in ("seconds", "cpu_s", "peak_mb")}
    with (place / "items.jsonl").open("a") as file:
        file.write(f'{{"key": "k{size:07d}", "x": {size}}}\n')
    more = _call(place, workers)
    assert more["computed"] == 1
    row["one_added"] = _chosen(more, "seconds", "cpu_s", "peak_mb")
    for name in ("again", "one_added"):
        print(f"{size} items, {name}: {row[name]}", file=sys.stderr)
    return row


def _nothing(place: Path, workers: int) -> dict[str, Any]:
    """A call for which no function is needed."""
    one = _call(place, workers)
    assert (one["run_id"], one["invocations"], one["computed"]) == ("", 0, 0), "a function was started"
    return one


def _call(place: Path, workers: int) -> dict[str, Any]:
    figures = place / "figures.json"
    command = ["map", f"{FUNCTIONS}:nothing", "--items", "items.jsonl", "--key", "key", "--out", "out.jsonl", "--max-workers", str(workers)]
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-P", "-c", CALL, str(figures), *command, "--json"], cwd=place, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return {**json.loads(done.stdout), **json.loads(figures.read_text()), "seconds": seconds}


def _chosen(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: round(found[name], 6) for name in names}


def fill(place: Path) -> None:
    """Writes the rows that a first call of the empty function would have written."""
    with contextlib.chdir(place):
        callee = inspect_callee(f"{FUNCTIONS}:nothing", selection=Selection())
        source = open_source("items.jsonl", ItemColumns(key="key"))
        assert scan(source).is_first.all()
        table = ResultTable.open((place / "out.jsonl.results").as_uri())
        for block in source.blocks():
            for n in range(len(block.ids)):
                table.add(_row(block.ids[n], block.key(n), block.items[n], callee.version))
                if table.unflushed[0] >= ROWS_PER_SHARD:
                    table.flush(function=callee.name)
        table.flush(function=callee.name)


def _row(id: Any, key: str, item: str, code: str) -> Row:
    return Row(
        id=bytes.fromhex(hex_of(id)),
        key=key,
        item=item,
        code=code,
        status="ok",
        result="null",
        data=None,
        error=None,
        traceback=None,
        attempts=1,
        function="1-0123456789ab",
        seconds=1.2e-05,
        cpu_seconds=1.1e-05,
        memory_mb=65.4,
        cost_usd=3.5e-10,
        recorded_at=time.time(),
    )


# -- the command --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _place(name: str) -> Iterator[Path]:
    """A folder with the module of the functions, and a home folder beside it."""
    before = os.environ.get("EPHEMERON_HOME")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / name
        place.mkdir()
        (place / f"{FUNCTIONS}.py").write_bytes((ROOT / "benchmarks" / f"{FUNCTIONS}.py").read_bytes())
        os.environ["EPHEMERON_HOME"] = str(Path(folder) / "home")
        try:
            yield place
        finally:
            os.environ.pop("EPHEMERON_HOME")
            if before is not None:
                os.environ["EPHEMERON_HOME"] = before


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--parts", default="beside,kills,groups,virtual,lambda,again", show_default=True)
@click.option("--turns", default=3, show_default=True, help="Measurements of a side and load, and of a second call.")
@click.option("--workers", default=2, show_default=True)
@click.option("--sides", "side_names", default="", help="Parts of the names of sides, separated by semicolons.  [default: all]")
@click.option("--loads", "load_names", default="", help="Parts of the names of loads, separated by semicolons.  [default: all]")
@click.option("--tasks", default=2000, show_default=True, help="Empty, of 1 ms, and of Zipf's times.")
@click.option("--long-tasks", default=100, show_default=True, help="Of 100 ms.")
@click.option("--longest-s", default=1.0, show_default=True, help="Of Zipf's times.")
@click.option("--payloads", default=200, show_default=True, help="Tasks with a large argument and a large result.")
@click.option("--payload-mb", default=5.0, show_default=True)
@click.option("--groups-mb", default=50.0, show_default=True, help="Of a table with `--groups` groups, of which each side fits all.")
@click.option("--items", default=1000, show_default=True, help="Under kills.")
@click.option("--points", default=20, show_default=True, help="At which something is killed.")
@click.option("--groups", default=10_000, show_default=True, help="Of the table whose groups are fitted under kills.")
@click.option("--table-mb", default=1000.0, show_default=True, help="Of that table.")
@click.option("--bootstraps", default=200, show_default=True, help="Regressions of a group.")
@click.option("--group-points", default=200, show_default=True, help="At which something is killed while groups are fitted.")
@click.option("--virtual-runs", default=50, show_default=True, help="Maps in virtual time.")
@click.option("--virtual-points", default=200, show_default=True, help="At which a function is killed in each of them.")
@click.option("--lambda-functions", default=200, show_default=True, help="Of the emulated Lambda, at once.")
@click.option("--lambda-items", default=4000, show_default=True, help="Of a map of a second each there.")
@click.option("--kinds", type=click.Choice(KINDS), multiple=True, default=KINDS, show_default=True, help="What is killed (repeatable).")
@click.option("--keys", default="10000,100000,1000000", show_default=True, help="Items of a map that is given again.")
@click.option("--computed", default="10000,100000", show_default=True, help="Those of them whose first call is made.")
def main(
    as_json: bool,
    parts: str,
    turns: int,
    workers: int,
    side_names: str,
    load_names: str,
    tasks: int,
    long_tasks: int,
    longest_s: float,
    payloads: int,
    payload_mb: float,
    groups_mb: float,
    items: int,
    points: int,
    groups: int,
    table_mb: float,
    bootstraps: int,
    group_points: int,
    virtual_runs: int,
    virtual_points: int,
    lambda_functions: int,
    lambda_items: int,
    kinds: tuple[str, ...],
    keys: str,
    computed: str,
) -> None:
    """Measures durable maps."""
    result: dict[str, Any] = environment()
    if "beside" in parts:
        names = [each.name for each in sides() if not side_names or any(part in each.name for part in side_names.split(";"))]
        loads = loads_of(tasks, long_tasks, payloads, payload_mb, longest_s, groups, groups_mb)
        loads = [load for load in loads if not load_names or any(part in load.name for part in load_names.split(";"))]
        with _place("beside") as place:
            if any(load.kind == "groups" for load in loads):
                write_groups(place / "groups.parquet", groups=groups, nbytes=int(groups_mb * 1e6))
            result["beside"] = beside(loads, names, turns, workers, place)
    if "kills" in parts:
        with _place("kills") as place:
            result["kills"] = Kills(items, points, workers, kinds, place).run()
    if "groups" in parts:
        with _place("groups") as place:
            fits = GroupKills(groups, group_points, workers, kinds, place, table_mb=table_mb, bootstraps=bootstraps)
            result["groups"] = {**fits.run(), "rows": fits.rows, "table_mb": round((place / "rows.parquet").stat().st_size / 1e6, 1)}
    if "virtual" in parts:
        with _place("virtual") as place:
            result["virtual"] = VirtualKills(groups, virtual_points, virtual_runs, place).run()
    if "lambda" in parts:
        with _place("lambda") as place:
            live = on_lambda(lambda_items, 1.0, lambda_functions, place, throttled=lambda_functions // 2, duplicates=lambda_functions // 10)
        with _place("lambda") as place:
            simulated = VirtualKills(
                25 * lambda_functions, lambda_functions // 4, 1, place, at_once=5 * lambda_functions, trouble=0.05
            ).run()
        result["lambda"] = {"is_right": live["is_right"] and simulated["is_right"], "emulated": live, "simulated": simulated}
    if "again" in parts:
        with _place("again") as place:
            result["again"] = again(_numbers(keys), _numbers(computed), turns, workers, place)
    if as_json:
        write(result)
    else:
        for part in ("beside", "kills", "groups", "virtual", "lambda", "again"):
            if part in result:
                print(part, json.dumps(result[part], indent=1))
    if not all(result.get(part, {"is_right": True})["is_right"] for part in ("kills", "groups", "virtual", "lambda")):
        sys.exit("under kills, an item has no row or several, was computed again though it had one, or the output is wrong")


if __name__ == "__main__":
    main()
