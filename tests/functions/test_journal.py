"""The event file of a local run: several writers, torn lines, a full disk."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from ephemeron.events import Ended, Event, Invoked, Note, to_json
from ephemeron.functions import jsonl
from ephemeron.functions.jsonl import EventsReplaced, Journal, begin_again, follow, unfinished


def note(n: int) -> Note:
    return Note(t=float(n), text=f"n{n}" + "é" * n)


async def take(path: Path, count: int) -> list[Event]:
    out: list[Event] = []
    async for event in follow(path):
        out.append(event)
        if len(out) == count:
            break
    return out


def test_lines_of_several_writers_are_followed_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    async def main() -> None:
        reading = asyncio.create_task(take(path, 5))
        await asyncio.sleep(0)  # it looks for a file that is not there yet
        writers = [Journal(path), Journal(path)]
        for n in range(5):
            writers[n % 2].append(to_json(note(n)))
            await asyncio.sleep(0)
        assert await reading == [note(n) for n in range(5)]

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_reader_notices_that_another_file_has_taken_the_place_of_the_one_that_it_follows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    begin_again(path)

    async def main() -> None:
        for n in range(3):
            Journal(path).append(to_json(note(n)))
        events = follow(path, once=True)
        assert [await anext(events) for _ in range(3)] == [note(n) for n in range(3)]
        begin_again(path)
        for n in range(10, 20):  # longer than the file before
            Journal(path).append(to_json(note(n)))
        with pytest.raises(EventsReplaced):
            await anext(events)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert asyncio.run(asyncio.wait_for(take(path, 10), 30)) == [note(n) for n in range(10, 20)]


def test_a_torn_line_is_skipped_and_closed_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(to_json(note(0)) + "\n" + to_json(note(1))[:20])
    Journal(path).append(to_json(note(2)))
    assert asyncio.run(asyncio.wait_for(take(path, 2), 120)) == [note(0), note(2)]


def test_on_a_full_disk_lines_wait_and_nothing_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    room = 30
    write = os.write

    def full(fd: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        written = write(fd, data[:room])
        room -= written
        return written

    monkeypatch.setattr(jsonl.os, "write", full)
    for n in range(4):
        journal.append(to_json(note(n)))
    assert journal.problem == "4 events wait to be written: No space left on device"
    room = 1_000_000
    journal.flush()
    assert journal.problem == ""
    assert asyncio.run(asyncio.wait_for(take(path, 4), 120)) == [note(n) for n in range(4)]


def test_what_has_not_ended_is_found(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert unfinished(path) == ([], 0.0)
    journal = Journal(path)
    invoked = [Invoked(t=float(n), rank=n, attempt=0, invocation=f"i{n}") for n in range(3)]
    for event in (*invoked, Ended(t=7.0, rank=1, attempt=0, invocation="i1", status="ok")):
        journal.append(to_json(event))
    journal.append("no event")
    assert unfinished(path) == ([invoked[0], invoked[2]], 7.0)
