"""A growing file, read once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")

from ephemeron.dashboard.run_view import LogReader


def test_lines_are_returned_once_and_a_torn_line_later(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = LogReader(path)
    assert reader.read() == []
    path.write_bytes(b"one\ntwo\nthr")
    assert reader.read() == [b"one", b"two"]
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert reader.read() == [b"three"]
    assert reader.share == 1.0


@pytest.mark.parametrize("how", ["shorter", "another"])
def test_a_replaced_file_is_noticed(tmp_path: Path, how: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    reader = LogReader(path)
    reader.read()
    if how == "shorter":
        path.write_bytes(b"new\n")
    else:
        (tmp_path / "other").write_bytes(b"a longer file\nthan before\n")
        (tmp_path / "other").replace(path)
    assert reader.read() == []
    assert reader.replaced


@given(lines=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=30), limit=st.integers(1, 50))
def test_any_limit_gives_the_same_lines(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], limit: int) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    reader, found = LogReader(path), list[bytes]()
    while part := reader.read(limit):
        found += part
    assert found == lines
