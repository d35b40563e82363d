"""The table of results: what was flushed is there, once, for one client at a time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ephemeron.errors import ChannelEmptied, DamagedObject, JobError, TableTaken
from ephemeron.maps import result_table
from ephemeron.maps.result_table import ResultTable, Row, id_of, present_client, reading

pytest.importorskip("pyarrow", reason="shards are Parquet")


def row(n: int, *, status: str = "ok", code: str = "c1", result: str | None = None) -> Row:
    return Row(
        id=id_of(b"", str(n).encode()),
        key=f"k{n}",
        item=f"{n:016x}",
        code=code,
        status=status,
        result=str(n) if result is None else result,
        data=None,
        error=None if status == "ok" else "ValueError: no",
        traceback=None,
        attempts=1,
        function="0-a",
        seconds=0.5,
        cpu_seconds=0.4,
        memory_mb=10.0,
        cost_usd=1e-6,
        recorded_at=1e9,
    )


def ids(*numbers: int) -> np.ndarray:
    return np.array([id_of(b"", str(n).encode()) for n in numbers], "S16")


@pytest.fixture
def address(tmp_path):
    return (tmp_path / "table").as_uri()


def files(address, folder):
    from pathlib import Path

    return sorted(path.name for path in (Path(address.removeprefix("file://")) / folder).glob("*"))


def test_rows_are_found_by_item_and_version_and_the_latest_counts(address):
    table = ResultTable.open(address)
    for each in (row(1), row(2, status="failed"), row(3, code="c0")):
        table.add(each)
    table.flush(function="m:f")
    table.add(row(2, result="22"))
    table.flush()
    found = ResultTable.open(address)
    assert found.state.function == "m:f"
    numbers, failed = found.known(code="c1").find(ids(1, 2, 3, 4))
    assert (numbers >= 0).tolist() == [True, True, False, False]
    assert not failed.any()
    assert found.take(numbers[:2], ("key", "result")).to_pylist() == [{"key": "k1", "result": "1"}, {"key": "k2", "result": "22"}]
    assert (found.known(code=None).find(ids(3))[0] >= 0).all()
    assert sum(part.num_rows for part in found.scan(("key",))) == 4


def test_small_shards_are_merged_and_what_does_not_count_is_removed(address):
    table = ResultTable.open(address)
    for n in range(100):
        table.add(row(n))
        table.flush()
    assert len(table.state.shards) < 20
    assert len(files(address, "rows")) == len(table.state.shards)
    assert len(files(address, "index")) == 1
    numbers, _ = table.known(code="c1").find(ids(*range(100)))
    assert table.take(numbers, ("result",)).column(0).to_pylist() == [str(n) for n in range(100)]
    from pathlib import Path

    (Path(address.removeprefix("file://")) / "rows" / "stray.parquet").write_bytes(b"x")
    table.remove_strays()
    assert len(files(address, "rows")) == len(table.state.shards)


def test_of_two_clients_one_goes_on(address):
    one, other = ResultTable.open(address), ResultTable.open(address)
    one.flush(client=present_client("run-1"))
    other.add(row(1))
    with pytest.raises(TableTaken, match="was taken over by another client"):
        other.flush(client=present_client("run-2"))
    assert ResultTable.open(address).state.client.run == "run-1"


def test_damage_and_loss_are_named(address):
    from pathlib import Path

    table = ResultTable.open(address)
    table.add(row(1))
    table.flush()
    [name] = files(address, "rows")
    path = Path(address.removeprefix("file://")) / "rows" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    with pytest.raises(DamagedObject, match=f"is damaged.*key rows/{name}"):
        ResultTable.open(address).known(code=None)
    path.unlink()
    with pytest.raises(ChannelEmptied, match=f"has lost a shard.*key rows/{name}"):
        ResultTable.open(address).known(code=None)
    [index] = files(address, "index")
    (path.parent.parent / "index" / index).write_bytes(b"{")
    with pytest.raises(DamagedObject, match=f"index/{index}"):
        ResultTable.open(address)
    (path.parent.parent / "index" / index).write_text(json.dumps({"format": 99}))
    with pytest.raises(JobError, match="of a later release"):
        ResultTable.open(address)


def test_rows_that_later_ones_of_the_same_version_replace_go_when_shards_are_merged(address):
    table = ResultTable.open(address)
    for n in range(8):
        table.add(row(1, status="failed" if n < 7 else "ok", result=str(n)))
        table.add(row(2, code=f"c{n}"))
        table.flush()
    assert sum(shard.rows for shard in table.state.shards) == 1 + 8, "rows of other versions stay"
    found = table.known(code="c1")
    rows, failed = found.find(ids(1, 2))
    assert not failed.any()
    assert table.take(rows, ("result",)).column(0).to_pylist() == ["7", "2"]
    assert files(address, "rows") == [f"{shard.digest}.parquet" for shard in table.state.shards]


def test_nothing_is_deleted_that_another_process_reads(address, monkeypatch):
    table = ResultTable.open(address)
    for n in range(4):
        table.add(row(n))
        table.flush()
    with reading(address):
        before = ResultTable.open(address)
        table.forget(np.array([True, False, True, False]))
        table.remove_strays()
        assert before.take([0, 1, 2, 3], ("key",)).column(0).to_pylist() == ["k0", "k1", "k2", "k3"]
        assert len(files(address, "rows")) == 4
    after = ResultTable.open(address)
    assert [text for part in after.scan(("key",)) for text in part.column(0).to_pylist()] == ["k0", "k2"]
    after.remove_strays()
    assert len(files(address, "rows")) == 2
    assert files(address, "readers") == []
    with reading(address):  # of a process that was killed
        monkeypatch.setattr(result_table, "SILENT_S", 0.0)
        assert not after.has_readers()
