"""The pages in headless Chromium."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from dashboard_worlds import TOKEN, progress, started, troubled_run, write_executor, write_run, write_study

pytest.importorskip("uvicorn", reason="the extra `dashboard` is not installed")
pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"),
]

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
POLICY = ("Content Security Policy", "requires 'TrustedHTML'")
"""What the browser says of a test that tries what the policy forbids."""
RUN, STUDY = "0%2Fruns%2Fr", "0%2Fstudies%2Fs"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("root")
    runs = {n: write_run(path / "runs" / n, troubled_run()) for n in ("r", "other")}
    (runs["r"] / "logs").mkdir()
    (runs["r"] / "logs" / "i1.txt").write_text("<img src=x onerror=\"document.title='taken'\">\nlast words\n")
    live = write_run(path / "runs" / "live", troubled_run()[:-1])
    write_study(path / "studies" / "s", {0: runs["r"], 2: live})
    measured = [progress(0, i, 1.0, metrics={"val": 3.0 - i / 10, "perplexity": math.exp(3.0 - i / 10)}) for i in range(3)]
    write_run(path / "runs" / "scales", [started(1, 3), *measured])
    write_executor(path / "runs" / "map-1", "finished")
    return path


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    """A dashboard in a thread, which has no signals."""
    import asyncio

    import uvicorn

    from ephemeron.dashboard.access import Access
    from ephemeron.dashboard.app import make_app
    from ephemeron.dashboard.library import Library
    from ephemeron.dashboard.server import listen

    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    routes = make_app(Library([root]))
    server = uvicorn.Server(
        uvicorn.Config(
            Access(routes, token=TOKEN, host="127.0.0.1", port=port), log_level="error", lifespan="off", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(FLAGS))
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page that is let in, and has told of no error at the end of the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = context.new_page()
    troubles: list[str] = []
    found.on("pageerror", lambda e: troubles.append(str(e)))
    found.on("console", lambda m: troubles.append(m.text) if m.type == "error" else None)
    found.set_default_timeout(30_000)
    found.goto(address + "?token=" + TOKEN.replace(" ", "%20"))
    yield found
    context.close()
    assert [text for text in troubles if not any(told in text for told in POLICY)] == []


def until(page: Any, expression: str, argument: object = None) -> None:
    """Waits until an expression is true. Playwright's own way evaluates strings in the page, which its policy forbids."""
    deadline = time.monotonic() + 180
    while not page.evaluate(expression, argument):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(30)


TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
PAINTED = "() => performance.getEntriesByName('timeline-painted').length > 0"


def show(page: Any, address: str, where: str) -> None:
    page.goto(address + "#/" + where)


def test_runs_are_filtered_sorted_and_compared(page: Any, address: str) -> None:
    rows = page.locator("tbody tr")
    playwright.expect(rows).to_have_count(5)
    page.get_by_label("Filter runs").fill("other")
    playwright.expect(rows).to_have_count(1)
    page.get_by_label("Filter runs").fill("")
    page.get_by_role("button", name="Run", exact=True).click()
    playwright.expect(page.get_by_role("columnheader", name="Run", exact=True)).to_have_attribute("aria-sort", "ascending")
    assert rows.locator("td:nth-child(2)").all_inner_texts()[2] == "other"
    page.get_by_label("Compare r", exact=True).check()
    page.get_by_label("Compare other").check()
    compared = page.get_by_role("region", name="Compare")
    playwright.expect(compared.locator(".u-series")).to_have_count(3)
    compared.get_by_text("Numbers as a table").click()
    playwright.expect(compared.locator("details tbody tr")).to_have_count(4)


def test_a_run_is_shown_with_its_marks_and_groups(page: Any, address: str) -> None:
    show(page, address, "run/" + RUN)
    playwright.expect(page.get_by_role("heading", level=1)).to_have_text("r")
    playwright.expect(page.locator(".legend")).to_contain_text("replacement")
    playwright.expect(page.get_by_role("region", name="Generations")).to_contain_text("request wide")
    playwright.expect(page.locator(".tiles")).to_contain_text("of $0.0100")
    until(page, PAINTED)
    colours = page.evaluate(
        """() => { const c = document.querySelector('.timeline .frame canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        const seen = {}; for (let i = 0; i < d.length; i += 4) { const k = [d[i], d[i+1], d[i+2]].join(); seen[k] = (seen[k] || 0) + 1; } return seen; }"""
    )
    compute, upload = colours.get("0,114,178", 0), colours.get("230,159,0", 0)
    assert compute / upload == pytest.approx(0.5 / 0.2, rel=0.15)


def test_text_of_users_is_never_markup(page: Any, address: str) -> None:
    show(page, address, "run/" + RUN)
    functions = page.get_by_role("region", name="Functions").first
    playwright.expect(functions.locator("tbody tr")).to_have_count(3)
    playwright.expect(page.get_by_role("region", name="Notes").first).to_contain_text("<b>note</b>")
    page.get_by_label("Log of rank 1, attempt 0").click()
    drawer = page.get_by_role("dialog")
    playwright.expect(drawer).to_contain_text("last words")
    playwright.expect(drawer).to_contain_text("<script>")
    assert page.locator("main img, dialog img, main script, dialog script, main b:not(.gauge b)").count() == 0
    assert page.title() == "r · ephemeron"


def test_the_page_can_load_nothing_of_others_and_make_no_markup(page: Any, address: str) -> None:
    show(page, address, "runs")
    refused = page.evaluate(
        """() => new Promise((done) => { addEventListener('securitypolicyviolation', (e) => done(e.effectiveDirective));
        const i = document.createElement('img'); i.src = 'http://127.0.0.1:1/x.png'; document.body.append(i); })"""
    )
    assert refused == "img-src"
    made = "() => { try { document.body.insertAdjacentHTML('beforeend', '<b>x</b>'); return 'made'; } catch (e) { return e.name; } }"
    assert page.evaluate(made) == "TypeError"


def test_a_trial_is_ended_by_a_click_after_a_question(page: Any, address: str, root: Path) -> None:
    show(page, address, "study/" + STUDY)
    mark = root / "runs" / "live" / "end"
    button = page.get_by_label("End trial 2", exact=True)
    button.click()
    page.get_by_role("button", name="Cancel").click()
    playwright.expect(page.get_by_role("dialog")).to_have_count(0)
    assert not mark.exists()
    playwright.expect(button).to_be_focused()
    button.press("Enter")
    page.get_by_role("button", name="End trial", exact=True).click()
    playwright.expect(page.get_by_role("dialog")).to_have_count(0)
    assert mark.exists()
    playwright.expect(page.locator("tbody")).to_contain_text("ending")
    playwright.expect(page.locator(".parallel path")).to_have_count(3)


def test_a_page_follows_its_run(page: Any, address: str, root: Path, tmp_path: Path) -> None:
    show(page, address, "run/0%2Fruns%2Fother")
    playwright.expect(page.locator(".tiles dd").first).to_contain_text("4 / 4")
    more = write_run(tmp_path / "more", [progress(rank, i, 0.5, t=8.0, attempt=1) for i in (4, 5) for rank in (0, 1)])
    with (root / "runs" / "other" / "events.jsonl").open("ab") as file:
        file.write((more / "events.jsonl").read_bytes())
    playwright.expect(page.locator(".tiles dd").first).to_contain_text("6 / 4")
    playwright.expect(page.locator(".tiles")).to_contain_text("0.5")


def test_no_page_is_wider_than_its_window(page: Any, address: str) -> None:
    for where in ("runs", "run/" + RUN, "studies", "study/" + STUDY, "regions", "data", "tasks"):
        page.set_viewport_size({"width": 1280, "height": 800})
        show(page, address, where)
        page.wait_for_selector("h1, .nothing strong")
        page.wait_for_timeout(150)
        for width, colours in product((1280, 420, 360, 768, 2560), ("light", "dark")):
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=colours)
            page.wait_for_timeout(30)
            assert page.evaluate(TOO_WIDE) <= 0, (where, width, colours)


def test_rows_have_all_their_values_in_a_narrow_window(page: Any, address: str) -> None:
    page.set_viewport_size({"width": 420, "height": 800})
    for where, table in (("runs", "Runs"), ("run/" + RUN, "Functions"), ("study/" + STUDY, "Trials"), ("tasks", "Functions of map-1")):
        show(page, address, where)
        row = page.get_by_role("region", name=table, exact=True).locator("tbody tr").first
        row.wait_for()
        beyond = """(row) => [...row.querySelectorAll('td')].filter((d) => d.checkVisibility() && (d.getBoundingClientRect().right > innerWidth ||
            d.scrollWidth > d.clientWidth + 1)).map((d) => d.dataset.label)"""
        assert row.evaluate(beyond) == [], where
    playwright.expect(page.locator("nav [aria-current]")).to_have_text("Tasks")
    playwright.expect(page.get_by_role("region", name="map-1", exact=True).locator(".pill").first).to_have_text("finished")
    playwright.expect(page.get_by_role("region", name="map-1", exact=True).locator(".tiles")).to_contain_text("$0.00123")
    show(page, address, "data")
    playwright.expect(page.locator("nav [aria-current]")).to_have_text("Data")


def test_metrics_of_another_scale_have_an_axis_of_their_own_and_one_can_be_chosen(page: Any, address: str) -> None:
    show(page, address, "run/0%2Fruns%2Fscales")
    metrics = page.get_by_role("region", name="Metrics")
    playwright.expect(metrics.locator(".u-legend")).to_contain_text("perplexity (right)")
    playwright.expect(metrics.locator(".u-legend")).not_to_contain_text("val (right)")
    assert metrics.locator(".u-axis").count() == 3
    metrics.get_by_label("Metric", exact=True).select_option("val")
    playwright.expect(metrics.locator(".u-series")).to_have_count(2)
    assert metrics.locator(".u-axis").count() == 2


def test_pictures_of_files_scroll_where_there_is_no_room(browser: Any, tmp_path: Path) -> None:
    from ephemeron.rendering.page import card, document, scrolled, table, tiled
    from ephemeron.rendering.svg import el

    wide = scrolled(el("svg", el("text", "words", x=0, y=12), viewBox="0 0 1160 200", class_="chart"))
    rows = table(["device", "operators", "held"], [["near-1", 29, "76.2 MB"]])
    tiles = tiled([("Bound by", "a_limit_with_a_long_name", "")])
    (tmp_path / "page.html").write_text(document("page", [tiles, card("Picture", wide), card("Table", rows)]))
    context = browser.new_context(viewport={"width": 420, "height": 800})
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate(TOO_WIDE) <= 0
    assert page.locator("svg.chart").bounding_box()["width"] == 960
    assert page.locator("td").first.bounding_box()["height"] < 40, "its hyphen is no place for a break"
    context.close()


def test_every_control_has_a_name_and_the_keyboard_reaches_the_timeline(page: Any, address: str) -> None:
    show(page, address, "run/" + RUN)
    until(page, PAINTED)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, a, input, select, canvas[tabindex]')].filter((e) => e.checkVisibility() &&
        !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    canvas = page.locator(".timeline .frame canvas")
    canvas.focus()
    before = canvas.evaluate("(c) => c.toDataURL()")
    page.keyboard.press("+")
    until(page, "(b) => document.querySelector('.timeline .frame canvas').toDataURL() !== b", before)
    page.keyboard.press("0")
    until(page, "(b) => document.querySelector('.timeline .frame canvas').toDataURL() === b", before)


def test_colours_follow_the_system_until_one_chooses(page: Any, address: str) -> None:
    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="light")
    light = ground()
    page.emulate_media(color_scheme="dark")
    dark = ground()
    assert light != dark
    page.get_by_role("button", name="Colours").click()
    assert ground() == light
    page.reload()
    playwright.expect(page.get_by_role("button", name="Colours: light")).to_be_visible()
    assert ground() == light


def test_the_timeline_grows_with_its_run(page: Any, address: str, root: Path, tmp_path: Path) -> None:
    folder = write_run(root / "runs" / "growing", troubled_run()[:6])
    show(page, address, "run/0%2Fruns%2Fgrowing")
    until(page, PAINTED)
    spans: Any = [("aggregate", 3.0, 60.0)]
    for i in range(3):  # in quick succession: the last one must be shown, too
        more = write_run(tmp_path / str(i), [progress(0, 2 + i, 0.5, t=60.0 + i, spans=spans)])
        with (folder / "events.jsonl").open("ab") as file:
            file.write((more / "events.jsonl").read_bytes())
    green = """() => { const c = document.querySelector('.timeline .frame canvas'), d = c.getContext('2d').getImageData(c.width * 0.8, 20, 1, 12).data;
        for (let i = 0; i < d.length; i += 4) if (d[i] === 0 && d[i+1] === 158 && d[i+2] === 115) return true; return false; }"""
    until(page, green)
