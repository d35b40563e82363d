"""What the package says of the folders in the archive, as values: by the commands and routes that its users have.

`DOORS` is the only place that names functions of the package instead of commands and routes; whoever moves one of them changes it here.

python tests/corpus/corpus_documents.py                              writes expected.json anew: with the code that made the folders, never to hide a difference
python tests/corpus/corpus_documents.py --show FOLDER [DOCUMENT]     prints documents of a folder, nothing left out, such as `runs/bsp report`
"""

from __future__ import annotations

import argparse
import asyncio
import html
import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
from corpus_archive import HOME, unpack

EXPECTED = Path(__file__).with_name("expected.json")
Documents = dict[str, dict[str, Any]]
"""By folder, as its path in the home folder, and name."""
_LONG = 8
"""Elements of a list that are kept; of a longer one only four, and checksums of all."""


# The doors: commands, routes, and functions that no command reaches.


def command(home: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of `ephemeron ARGUMENTS`."""
    from ephemeron.cli.main import main

    done = CliRunner().invoke(main, [*arguments], env={"EPHEMERON_HOME": str(home), "EPHEMERON_REPORT_PICTURE": "0", "COLUMNS": "160"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return done.exit_code, done.stdout, f"{type(done.exception).__name__}: {done.exception}"
    return done.exit_code, done.stdout, done.stderr


class Dashboard:
    """The routes of the dashboard over a home folder, without a server."""

    def __init__(self, home: Path) -> None:
        from ephemeron.dashboard.app import make_app
        from ephemeron.dashboard.library import Library

        self._app = make_app(Library([home]))

    def __call__(self, path: str, **query: object) -> Any:
        """A document; where it is refused, its status."""
        asked = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items())
        status, headers, body = asyncio.run(self._get(path, asked))
        if status != 200:
            return {"status": status}
        if headers[b"content-type"] == b"application/json":
            return json.loads(body)
        kept = {name.decode(): headers[name].decode() for name in sorted(headers) if name.startswith(b"x-")}
        return {**kept, "crc32": zlib.crc32(zlib.decompress(body))}

    async def _get(self, path: str, query: str) -> tuple[int, dict[bytes, bytes], bytes]:
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode(), "headers": []}
        scope |= {"http_version": "1.1", "scheme": "http", "root_path": "", "server": ("localhost", 80), "client": ("localhost", 1)}
        parts, answer = [], {}

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.update(message)
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return answer["status"], dict(answer["headers"]), b"".join(parts)


def bill_of_run(folder: Path) -> Any:
    """The summary of a run by the meter, fed with its events, whatever `result.json` says."""
    from ephemeron.config.typed import plain
    from ephemeron.runs.cost import CostMeter
    from ephemeron.runs.folders import RunFolder, events_of
    from ephemeron.runs.header import read_header
    from ephemeron.training.driver.records import read_result, run_spec
    from ephemeron.training.driver.result import summarize

    place = RunFolder(folder)
    record, known = read_header(place), read_result(place)
    assert record is not None
    spec = run_spec(record)
    meter = CostMeter(record.prices, servers=record.servers)
    for event in events_of(place):
        meter.feed(event)
    return plain(summarize(meter, spec, status="none" if known is None else known.status, final=None))


def bill_of_executor(folder: Path) -> Any:
    """What an executor's events cost, as far as they are written."""
    from ephemeron.prices import load_prices
    from ephemeron.runs.cost import CostMeter
    from ephemeron.runs.folders import RunFolder, events_of

    place = RunFolder(folder)
    if not place.events.exists():
        return None
    meter = CostMeter(load_prices("objects"))
    for event in events_of(place):
        meter.feed(event)
    t = meter.ended_at
    return {"t": t, "invocations": meter.invocations, "gb_seconds": meter.gb_seconds_at(t), "cost_usd": meter.cost_usd(t)}


def status_of_study(folder: Path) -> Any:
    from ephemeron.config.typed import plain
    from ephemeron.tuning.folder import StudyFolder

    place = StudyFolder(folder)
    status = place.status()
    return {**plain(status), "is_driven": place.is_driven, "over": status.over}


DOORS = (command, Dashboard, bill_of_run, bill_of_executor, status_of_study)


# Documents, by kind: what the home folders hold -> folder -> document -> value.


def runs_of(home: Path) -> list[Path]:
    return sorted(path.parent for path in home.glob("runs/*/run.json"))


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def listing(home: Path) -> Documents:
    """`ephemeron runs --json`: a row for each run, and the order of the rows."""
    code, out, err = command(home, "runs", "--json")
    rows = _lines(out)
    found: Documents = {str(Path(row["folder"]).relative_to(home)): {"row": row} for row in rows}
    return {**found, "": {"rows": {"exit": code, "error": err, "order": [row["run_id"] for row in rows]}}}


def reports(home: Path) -> Documents:
    """`ephemeron report RUN`: what it prints, and the text of its page."""
    found: Documents = {}
    with tempfile.TemporaryDirectory() as out:
        for folder in runs_of(home):
            code, printed, err = command(home, "report", folder.name, "--out", f"{out}/report")
            page = Path(out, "report", "report.html")
            text = page.read_text() if page.exists() else ""
            said = [line for line in printed.splitlines() if not line.startswith("wrote ")]
            document = {"exit": code, "printed": said, "error": err, "page": _text(text), "drawings": _drawings(text)}
            found[f"runs/{folder.name}"] = {"report": document}
            page.unlink(missing_ok=True)
    return found


_ASIDE = re.compile(r"<(style|script|svg)\b.*?</\1>", re.DOTALL)


def _text(page: str) -> list[str]:
    words = re.sub(r"<[^>]*>", "\n", _ASIDE.sub("\n", page))
    return [line for each in words.splitlines() if (line := html.unescape(each).strip())]


def _drawings(page: str) -> list[dict[str, object]]:
    return [
        {"elements": drawn.count("<"), "crc32": zlib.crc32(drawn.encode())} for drawn in re.findall(r"<svg\b.*?</svg>", page, re.DOTALL)
    ]


def outputs(home: Path) -> Documents:
    """`ephemeron logs RUN`."""
    found: Documents = {}
    for folder in runs_of(home):
        code, out, err = command(home, "logs", folder.name)
        found[f"runs/{folder.name}"] = {"logs": {"exit": code, "lines": out.splitlines(), "error": err}}
    return found


def remains(home: Path) -> Documents:
    """`ephemeron runs clean --dry-run --json`: of each run, and everything."""
    found: Documents = {}
    for folder in runs_of(home):
        code, out, err = command(home, "runs", "clean", folder.name, "--dry-run", "--json", "--force")
        found[f"runs/{folder.name}"] = {"clean": {"exit": code, "objects": _lines(out), "error": err}}
    code, out, err = command(home, "runs", "clean", "--dry-run", "--json")
    items = _lines(out)
    for item in items:
        place = item["place"].removeprefix(f"{home}/") if item["place"].startswith(str(home)) else f"{item['kind']}/{item['name']}"
        found.setdefault(place, {})["inventory"] = item
    found[""] = {"inventory": {"exit": code, "error": err, "items": len(items)}}
    return found


def bills(home: Path) -> Documents:
    """What events cost."""
    found: Documents = {f"runs/{folder.name}": {"bill": bill_of_run(folder)} for folder in runs_of(home)}
    for folder in home.glob("tasks/*/"):
        found[f"tasks/{folder.name}"] = {"bill": bill_of_executor(folder)}
    return found


def studies(home: Path) -> Documents:
    """`study.json`, as the package reads it, and the pages of studies."""
    ask = Dashboard(home)
    found: Documents = {}
    for row in ask("/api/studies")["studies"]:
        folder = Path(row["path"])
        page, curves = (ask(f"/api/study{part}", key=row["key"]) for part in ("", "/curves"))
        documents = {"dashboard row": row, "dashboard page": page, "dashboard curves": curves, "status": status_of_study(folder)}
        found[str(folder.relative_to(home))] = documents
    return found


def pages(home: Path) -> Documents:
    """What the pages of runs ask for."""
    ask = Dashboard(home)
    found: Documents = {}
    for row in ask("/api/runs")["runs"]:
        key = row["key"]
        while (page := ask("/api/run", key=key)).get("share_read", 1.0) < 1.0:
            pass
        functions = ask("/api/run/functions", key=key)
        names = [each["invocation"] for each in functions["rows"]]
        found[str(Path(row["path"]).relative_to(home))] = {
            "dashboard row": row,
            "dashboard page": page,
            "dashboard functions": functions,
            "dashboard series": ask("/api/run/series", key=key),
            "dashboard marks": ask("/api/run/marks", key=key),
            "dashboard timeline": ask("/api/run/tile", key=key, level=-4, index=0),
            "dashboard output": {
                name: ask("/api/run/output", key=key, invocation=name)
                for name in sorted({*names[:1], *names[-1:]})
                if row["platform"] != "simulated"
            },
        }
    return found


def refusals(home: Path) -> Documents:
    """What `stop`, `attach`, `resume` and `resize` say of runs that have ended. Nothing is done: each is refused."""
    found: Documents = {}
    for folder in runs_of(home):
        record = json.loads((folder / "run.json").read_text())
        result = folder / "result.json"
        status = json.loads(result.read_text())["status"] if result.exists() else "interrupted"
        simulated, sparse, here = (record["platform"] == "simulated", record["spec"].get("sparse"), record["platform"] != "aws")
        verbs = {
            "stop": here,
            "resize": here,
            "attach": simulated or (sparse and status != "finished"),
            "resume": simulated or status == "finished",
        }
        for verb in (verb for verb, refused in verbs.items() if refused):
            code, out, err = command(home, verb, folder.name, *(["--workers", "3"] if verb == "resize" else []))
            assert code == 2, f"{verb} {folder.name} was not refused"
            found.setdefault(f"runs/{folder.name}", {})[verb] = out + err
    return found


def others(home: Path) -> Documents:
    """Pages of executors and data services."""
    ask = Dashboard(home)
    found: Documents = {f"tasks/{each['run']}": {"dashboard page": each} for each in ask("/api/tasks")["tasks"]}
    for each in ask("/api/services")["services"]:
        found[str(Path(each["folder"]).relative_to(home))] = {"dashboard page": each}
    session = ask("/api/session")
    return {**found, "": {"dashboard session": {name: session[name] for name in ("phases", "columns", "roots")}}}


KINDS: dict[str, Callable[[Path], Documents]] = {
    each.__name__: each for each in (listing, reports, outputs, remains, bills, studies, pages, refusals, others)
}
CLOCK = frozenset({"history"})
"""Keys with the time of now."""


def documents(kind: str, homes: dict[str, Path], *, whole: bool = False) -> dict[str, Any]:
    """Documents of a kind, as `HOME/FOLDER: DOCUMENT` -> value.

    Args:
        kind: one of `KINDS`.
        homes: that `unpack` has made.
        whole: keep all of long lists.
    """
    found: dict[str, Any] = {}
    for name, home in sorted(homes.items()):
        for folder, each in KINDS[kind](home).items():
            for document, value in each.items():
                found[f"{name}/{folder}: {document}"] = _plain(value, str(home), whole)
    return found


def _plain(value: Any, home: str, whole: bool) -> Any:
    """The same without the path of the home folder, the time of now, and most of what is long."""
    if isinstance(value, dict):
        return {name.replace(home, HOME): _plain(each, home, whole) for name, each in value.items() if name not in CLOCK}
    if isinstance(value, list | tuple):
        every = [_plain(each, home, whole) for each in value]
        if len(every) <= _LONG or whole:
            return every
        return [*every[:4], {"length": len(every), "crc32": _checksums(every)}]
    if isinstance(value, str):
        value = value.replace(home, HOME)
        if len(value) > 600 and not whole:
            return f"{value[:200]}… {len(value)} characters, crc32 {zlib.crc32(value.encode())}"
    return value


def _checksums(values: list[Any]) -> dict[str, int]:
    """Checksums of a list: of tables, one for each key, so that another key is an added one; of others, a single one."""
    columns: dict[str, list[Any]] = {}
    for number, value in enumerate(values):
        for key, each in _cells(value, ""):
            columns.setdefault(key, []).append([number, each])
    return {key: zlib.crc32(json.dumps(column, sort_keys=True).encode()) for key, column in columns.items()}


def _cells(value: Any, above: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _cells(each, f"{above}/{name}" if above else name)
    else:
        yield above, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", nargs="+", metavar="")
    options = parser.parse_args()
    os.environ["EPHEMERON_REPORT_PICTURE"] = "0"
    import time

    with tempfile.TemporaryDirectory() as place:
        homes = unpack(Path(place))
        every: dict[str, Any] = {}
        for kind in KINDS:
            began = time.monotonic()
            found = documents(kind, homes, whole=bool(options.show))
            print(f"{kind}: {len(found)} documents in {time.monotonic() - began:.1f} s", file=sys.stderr)
            every |= {f"{kind}: {name}": value for name, value in found.items()}
    if options.show:
        wanted = [name for name in every if all(word in name.replace("/: ", ": ") for word in options.show)]
        for name in wanted:
            print(name, json.dumps(every[name], indent=1, sort_keys=True, ensure_ascii=False))
        return
    lines = (f"{json.dumps(name)}: {json.dumps(every[name], sort_keys=True, ensure_ascii=False)}" for name in sorted(every))
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{EXPECTED}: {EXPECTED.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
