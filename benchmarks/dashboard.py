"""The dashboard with a long run, in headless Chromium: first paint, reading of the log, and frames while the timeline is panned.

The log is made here: 200 functions with 10,000 iterations each, six spans an iteration, hand-offs, deaths, replacements and evaluations: about
1.2 GB. The server reads it in a process of its own. `cold`: the page is opened when the server has read nothing; `warm`: when it has read
all. Paint times are the browser's own performance entries. While panning, a drag moves the timeline by a few pixels a step, and every frame is
timed by requestAnimationFrame; a frame that takes 1.5 times as long as the display's is late. There is no GPU: frames are drawn by the processor.

    python -m benchmarks.dashboard --json
    python -m benchmarks.dashboard --json --reading     CPU time of a reading alone, in this process, without a browser
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import condensed, environment, write
from ephemeron.events import Ended, Evaluated, FaultFired, Invoked, RunEnded, RunStarted, Started, Traffic, to_json

GOALS = {"first_paint_ms": 1000.0, "frames_per_s": 60.0}
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TOKEN = "a token of the benchmark"
STEP_S = 0.5
"""Seconds of an iteration."""
LIFE = 1700
"""Iterations of an invocation."""
_TRACKING = """() => { window.frames = []; let last = null, on = true; window.stop = () => { on = false; };
const f = (t) => { if (last !== null) window.frames.push(t - last); last = t; if (on) requestAnimationFrame(f); }; requestAnimationFrame(f); }"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--functions", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--loads", type=int, default=5, help="page loads when the log is read (default: %(default)s)")
    parser.add_argument("--reading", action="store_true", help="read the log in this process, and nothing else")
    parser.add_argument("--root", type=Path, help="folder in which the log is kept for the next time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ephemeron-dashboard-") as name:
        root = (arguments.root or Path(name)).absolute()
        if not (root / "runs" / "long").exists():
            write_log(root / "runs" / "long", arguments.functions, arguments.iterations)
        nbytes = (root / "runs" / "long" / "events.jsonl").stat().st_size
        result: dict[str, Any] = {
            **environment(),
            "benchmark": "dashboard",
            "functions": arguments.functions,
            "iterations": arguments.iterations,
            "log_mb": round(nbytes / 1e6, 1),
            "goals": GOALS,
            **(reading(root, nbytes) if arguments.reading else measure(root, arguments.loads)),
        }
    if arguments.json:
        write(result)
    else:
        print(json.dumps({k: v for k, v in result.items() if k not in ("machine", "versions")}, indent=1))


def write_log(folder: Path, functions: int, iterations: int) -> None:
    """Writes a run's folder."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run_id": "long", "platform": "aws", "job": "long", "workers": functions}))
    with (folder / "events.jsonl").open("w", buffering=1 << 20) as file:

        def put(event: Any) -> None:
            file.write(to_json(event) + "\n")

        put(
            RunStarted(
                t=0.0,
                run_id="long",
                job="long",
                workers=functions,
                aggregators=8,
                memory_mb=1769,
                iterations=iterations,
                epochs=10,
                samples=100_000,
                configuration={"sync": "bsp", "budget_usd": 50.0},
                wall_time=1.7e9,
            )
        )
        attempts = [0] * functions
        for rank in range(functions):
            _begin(put, rank, 0, 0.1 + rank * 0.01, "start")
        for i in range(iterations):
            t = 3.0 + i * STEP_S
            for rank in range(functions):
                if i and (i + 7 * rank) % LIFE == 0:
                    dies = (i + rank) % 5 == 0
                    _end(put, rank, attempts[rank], t, dies)
                    attempts[rank] += 1
                    _begin(put, rank, attempts[rank], t + 0.05, "replacement" if dies else "relay")
                file.write(_progress(rank, attempts[rank], i, t, functions))
            if (i + 1) % (iterations // 10 or 1) == 0:
                for rank in range(functions):
                    sums: Any = {"loss": (3.0, 10.0), "accuracy": (8.0, 10.0)}
                    put(Evaluated(t=t + 0.4, rank=rank, attempt=attempts[rank], epoch=1, iteration=i, samples=10, sums=sums))
        end = 4.0 + iterations * STEP_S
        for rank in range(functions):
            _end(put, rank, attempts[rank], end, False)
        put(RunEnded(t=end + 0.1, status="finished"))


def _begin(put: Any, rank: int, attempt: int, t: float, reason: Any) -> None:
    put(Invoked(t=t, rank=rank, attempt=attempt, invocation=f"{rank}x{attempt}", reason=reason))
    put(Started(t=t + 0.3, rank=rank, attempt=attempt, invocation=f"{rank}x{attempt}", cold=True))


def _end(put: Any, rank: int, attempt: int, t: float, dies: bool) -> None:
    if dies:
        put(FaultFired(t=t, rank=rank, attempt=attempt, fault="kill"))
    put(
        Ended(
            t=t,
            rank=rank,
            attempt=attempt,
            invocation=f"{rank}x{attempt}",
            status="lost" if dies else "ok",
            outcome="relayed",
            billed_s=850.0,
            gb_seconds=1468.0,
            memory_mb=1769,
            peak_memory_mb=612.0,
            traffic=Traffic(puts=1),
        )
    )


def _progress(rank: int, attempt: int, i: int, t: float, functions: int) -> str:
    """A line as `to_json` writes it."""
    u = ((rank * 7919 + i * 104729) % 1000) / 1000
    a, b, c = t + 0.18 + 0.08 * u, t + 0.27 + 0.08 * u, t + 0.36 + 0.06 * u
    loss = 2.3 * (1 + i / 300) ** -0.7 + 0.1 * u
    kind = "aggregate" if rank < 8 else "wait"
    return (
        f'{{"kind":"progress","t":{t + STEP_S:.4f},"rank":{rank},"attempt":{attempt},"iteration":{i},"epoch":{i // 1000},"samples":32,'
        f'"loss":{loss:.6f},"version":{i},"spans":[["compute",{t:.4f},{a:.4f}],["upload",{a:.4f},{b:.4f}],["{kind}",{b:.4f},{c:.4f}],'
        f'["download",{c:.4f},{t + 0.46:.4f}],["compute",{t + 0.46:.4f},{t + 0.48:.4f}],["wait",{t + 0.48:.4f},{t + STEP_S:.4f}]],'
        f'"traffic":{{"puts":{9 * i},"gets":{9 * i},"polls":{i},"deletes":{i},"lists":0,"bytes_up":{90_000 * i},"bytes_down":{90_000 * i},'
        f'"direct_bytes_sent":0,"direct_bytes_received":0}},"cpu_s":{0.3 * i:.3f},"metrics":{{}}}}\n'
    )


def reading(root: Path, nbytes: int) -> dict[str, Any]:
    """CPU time of a whole reading of the log."""
    from ephemeron.dashboard.run_view import RunView

    view, began = RunView(root / "runs" / "long"), time.process_time()
    while view.advance():
        pass
    cpu_s = time.process_time() - began
    return {"reading_cpu_s": round(cpu_s, 2), "mb_per_cpu_s": round(nbytes / 1e6 / cpu_s, 1)}


def measure(root: Path, loads: int) -> dict[str, Any]:
    """All measurements with one server and one browser."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with serving(root) as (process, address), sync_playwright() as p:
        began = time.perf_counter()
        browser = p.chromium.launch(executable_path=chromium, headless=True, args=list(FLAGS))
        cold = load(browser, address)
        memory = psutil.Process(process.pid).memory_info
        while (share := _get(address, "run")["share_read"]) < 1.0:
            time.sleep(0.02)
        read_s = time.perf_counter() - began
        assert share == 1.0
        warm = [load(browser, address) for _ in range(loads)]
        pans = {name: pan(browser, address, zooms) for name, zooms in (("whole_run", 1), ("minute", 6), ("iterations", 11))}
        result = {
            "browser": browser.version,
            "cold": cold,
            "log_read_s": round(read_s, 1),
            "server_memory_mb": round(memory().rss / 1e6),
            "warm": {name: condensed([one[name] for one in warm]) for name in warm[0]},
            "pan": pans,
        }
        browser.close()
    return result


def load(browser: Any, address: str) -> dict[str, float]:
    """Opens the run's page in a new profile: milliseconds from the navigation on, and kilobytes that it fetched."""
    context, page = _page(browser, address)
    while not page.evaluate("() => performance.getEntriesByName('timeline-painted').length"):
        page.wait_for_timeout(20)
    page.wait_for_timeout(1500)
    found = page.evaluate(
        """() => ({ first_paint_ms: performance.getEntriesByName('first-paint')[0].startTime,
        first_contentful_paint_ms: performance.getEntriesByName('first-contentful-paint')[0].startTime,
        timeline_painted_ms: performance.getEntriesByName('timeline-painted')[0].startTime,
        fetched_kb: performance.getEntriesByType('resource').reduce((n, e) => n + e.transferSize, 0) / 1000 })"""
    )
    context.close()
    return {name: round(value, 1) for name, value in found.items()}


def pan(browser: Any, address: str, zooms: int) -> dict[str, Any]:
    """Drags the timeline for some seconds, after zooming in `zooms` times."""
    context, page = _page(browser, address)
    canvas = page.locator(".timeline .frame canvas")
    canvas.scroll_into_view_if_needed()
    canvas.focus()
    for _ in range(zooms):
        page.keyboard.press("+")
    page.wait_for_timeout(2500)
    box = canvas.bounding_box()
    x, y = box["x"] + 0.7 * box["width"], box["y"] + 120
    page.evaluate(_TRACKING)
    ends = time.perf_counter() + 5
    while time.perf_counter() < ends:
        page.mouse.move(x, y)
        page.mouse.down()
        for i in range(60):
            page.mouse.move(x - 9 * i, y)
        page.mouse.up()
    frames = page.evaluate("() => { stop(); return frames; }")
    span = page.evaluate("() => document.querySelector('.timeline').dataset.span || ''")
    context.close()
    ordered = sorted(frames)
    usual = statistics.median(frames)
    return {
        "frames_per_s": round(1000 * len(frames) / sum(frames), 1),
        "frame_ms": condensed(frames),
        "frame_ms_p95": round(ordered[int(0.95 * len(ordered))], 2),
        "late": round(sum(f > 1.5 * usual for f in frames) / len(frames), 4),
        "span_s": round(float(span), 2),
    }


def _page(browser: Any, address: str) -> tuple[Any, Any]:
    context = browser.new_context(viewport={"width": 1600, "height": 1000})
    page = context.new_page()
    page.goto(f"{address}/?token={TOKEN.replace(' ', '%20')}")
    page.goto("about:blank")
    page.goto(f"{address}/#/run/0%2Fruns%2Flong")
    while not page.evaluate("() => performance.getEntriesByName('timeline-painted').length"):
        page.wait_for_timeout(20)
    return context, page


@contextmanager
def serving(root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A dashboard in a process of its own."""
    command = [
        sys.executable,
        "-c",
        "from ephemeron.cli.main import main; main()",
        "serve",
        "dashboard",
        str(root),
        "--port",
        "0",
        "--json",
    ]
    environ = {**os.environ, "EPHEMERON_DASHBOARD_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["address"].partition("/?")[0]
        finally:
            process.terminate()


def _get(address: str, name: str) -> Any:
    request = urllib.request.Request(f"{address}/api/{name}?key=0/runs/long", headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
