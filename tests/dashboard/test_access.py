"""Who is let in."""

from __future__ import annotations

from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
from dashboard_worlds import TOKEN, troubled_run, write_run

pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")
pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")
testclient = pytest.importorskip("starlette.testclient", reason="starlette's test client needs httpx", exc_type=Exception)

from ephemeron.dashboard.access import CHANGE_HEADER, Access  # noqa: E402
from ephemeron.dashboard.app import make_app  # noqa: E402
from ephemeron.dashboard.library import Library  # noqa: E402

ORIGIN = "http://127.0.0.1:7080"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[testclient.TestClient]:
    write_run(tmp_path / "r", troubled_run())
    app = Access(make_app(Library([tmp_path])), token=TOKEN, host="127.0.0.1", port=7080)
    with testclient.TestClient(app, base_url=ORIGIN, follow_redirects=False) as found:
        yield found


def log_in(client: testclient.TestClient) -> None:
    assert client.get("/", params={"token": TOKEN}).status_code == 303


@pytest.mark.parametrize("path", ["/", "/api/session", "/api/runs", "/static/app.js", "/api/stream?topic=runs", "/nowhere"])
def test_nothing_is_shown_without_the_token(client: testclient.TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 401
    assert response.text.count("\n") == 0
    assert "ephemeron serve dashboard" in response.text


def test_a_wrong_token_is_refused_in_one_line(client: testclient.TestClient) -> None:
    response = client.get("/", params={"token": "wrong"})
    assert (response.status_code, response.text.splitlines()) == (
        401,
        ["wrong token: open the address that `ephemeron serve dashboard` has printed"],
    )
    assert "set-cookie" not in response.headers
    assert client.get("/api/runs", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_the_token_becomes_a_cookie_that_is_not_the_token(client: testclient.TestClient) -> None:
    response = client.get("/", params={"token": TOKEN})
    assert (response.status_code, response.headers["location"]) == (303, "/")
    morsel = SimpleCookie(response.headers["set-cookie"])["ephemeron-7080"]
    assert morsel["httponly"]
    assert morsel["samesite"] == "strict"
    assert TOKEN not in response.headers["set-cookie"]
    assert client.get("/").status_code == 200
    assert [r["run_id"] for r in client.get("/api/runs").json()["runs"]] == ["r"]


def test_the_token_is_taken_at_no_other_address(client: testclient.TestClient) -> None:
    assert client.get("/api/runs", params={"token": TOKEN}).status_code == 401


def test_a_program_sends_the_token_in_a_header(client: testclient.TestClient) -> None:
    assert client.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example:7080", "127.0.0.1.evil.example:7080", "127.0.0.1:9999", "", "10.0.0.9:7080"])
def test_another_host_is_refused_even_with_the_cookie(client: testclient.TestClient, host: str) -> None:
    log_in(client)
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:7080", "localhost:7080", "[::1]:7080"])
def test_names_of_this_machine_are_taken(client: testclient.TestClient, host: str) -> None:
    headers = {"host": host, "authorization": f"Bearer {TOKEN}"}
    assert client.get("/api/runs", headers=headers).status_code == 200


def wanted(client: testclient.TestClient) -> dict[str, str]:
    session = client.get("/api/session").json()
    assert session["change_header"] == CHANGE_HEADER
    return {session["change_header"]: session["change_value"], "origin": ORIGIN}


@pytest.mark.parametrize(
    "spoiled",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {CHANGE_HEADER: "guessed"},
        {CHANGE_HEADER: ""},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_a_change_needs_header_and_origin(client: testclient.TestClient, spoiled: dict[str, str]) -> None:
    log_in(client)
    body = {"key": "0/r"}
    refused = client.post("/api/run/end", json=body, headers=wanted(client) | spoiled)
    assert refused.status_code == 403
    reached = client.post("/api/run/end", json=body, headers=wanted(client))
    assert reached.status_code == 409, "the run is not running, which only the handler knows"


def test_a_form_of_another_site_changes_nothing(client: testclient.TestClient) -> None:
    log_in(client)
    response = client.post("/api/run/end", data={"key": "0/r"}, headers={"origin": "http://evil.example"})
    assert response.status_code == 403


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js", "/nowhere", "/api/run?key=none"])
def test_every_answer_has_a_policy_that_allows_own_files_only(client: testclient.TestClient, path: str) -> None:
    for _ in range(2):
        headers = client.get(path).headers
        policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert policy["frame-ancestors"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert headers["x-content-type-options"] == "nosniff"
        log_in(client)


def test_a_remote_dashboard_takes_its_names_and_addresses_but_no_other_name(tmp_path: Path) -> None:
    app = Access(make_app(Library([tmp_path])), token=TOKEN, host="0.0.0.0", port=7080, names=["runs.example"])
    with testclient.TestClient(app, base_url="http://10.1.2.3:7080") as client:
        bearer = {"authorization": f"Bearer {TOKEN}"}
        assert client.get("/api/runs", headers=bearer).status_code == 200
        assert client.get("/api/runs", headers={**bearer, "host": "runs.example"}).status_code == 200
        assert client.get("/api/runs", headers={**bearer, "host": "evil.example"}).status_code == 421
