"""Pictures of a timeline: every phase has its share."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")

from ephemeron.dashboard.phases import ALIVE, COLUMNS, MIXED_ROWS, NOTHING, Coverage, PhaseLanes
from ephemeron.events import PHASES

COMPUTE, UPLOAD, WAIT = (2 + PHASES.index(p) for p in ("compute", "upload", "wait"))


def lanes(spans: list[tuple[str, float, float]]) -> PhaseLanes:
    found = PhaseLanes()
    found.add(3, spans)
    return found


def test_a_column_shorter_than_a_span_has_its_phase() -> None:
    found = lanes([("compute", 0.0, 1.0), ("upload", 1.0, 2.0)])
    tile = found.tile([3], {3: [(0.0, 4.0)]}, start=0.0, column_s=1 / 128, rows=5)
    assert tile.shape == (5, COLUMNS)
    assert (tile[:, :128] == COMPUTE).all()
    assert (tile[:, 128:256] == UPLOAD).all()
    assert (tile[:, 256:512] == ALIVE).all()


def test_before_and_after_a_function_there_is_nothing() -> None:
    tile = lanes([]).tile([3, 4], {4: [(1.0, 2.0)]}, start=0.0, column_s=1 / 128, rows=3)
    assert (tile[:3] == NOTHING).all()
    assert (tile[3:, 128:256] == ALIVE).all()
    assert (tile[3:, :128] == NOTHING).all()
    assert (tile[3:, 256:] == NOTHING).all()


@pytest.mark.parametrize("rows", [1, 12, 20])
def test_columns_of_many_spans_keep_the_shares(rows: int) -> None:
    spans = [s for i in range(5120) for s in (("compute", i, i + 0.5), ("upload", i + 0.5, i + 0.6), ("wait", i + 0.6, i + 1.0))]
    tile = lanes(spans).tile([3], {3: [(0.0, 5120.0)]}, start=0.0, column_s=10.0, rows=rows)
    for value, share in ((COMPUTE, 0.5), (UPLOAD, 0.1), (WAIT, 0.4)):
        assert (tile == value).mean() == pytest.approx(share, abs=0.02)


def test_low_lanes_have_the_shares_in_eighths_in_every_column() -> None:
    spans = [s for i in range(5120) for s in (("compute", i, i + 0.5), ("upload", i + 0.5, i + 0.625), ("wait", i + 0.625, i + 1.0))]
    tile = lanes(spans).tile([3], {3: [(0.0, 5120.0)]}, start=0.0, column_s=10.0, rows=MIXED_ROWS)
    assert [(tile == value).sum(axis=0).tolist() for value in (COMPUTE, UPLOAD, WAIT)] == [[n] * COLUMNS for n in (4, 1, 3)]


def test_where_phases_overlap_the_one_nearest_to_progress_is_shown() -> None:
    found = lanes([("wait", 0.0, 4.0), ("compute", 1.0, 2.0)])
    tile = found.tile([3], {3: [(0.0, 4.0)]}, start=0.0, column_s=1 / 128, rows=1)
    assert (tile[0, 128:256] == COMPUTE).all()
    assert (tile[0, :128] == WAIT).all()
    assert found.totals(3)["wait"] == 4.0


@given(st.lists(st.lists(st.tuples(st.floats(0, 100), st.floats(-1, 10)), max_size=30), max_size=3))
def test_a_coverage_is_the_union_of_intervals_in_pieces(pieces: list[list[tuple[float, float]]]) -> None:
    """Of intervals that are not in order, what lies before the end of an earlier one counts once."""
    coverage, merged, reached = Coverage(), 0.0, -1.0
    for pairs in pieces:
        ends = [a + length for a, length in pairs]
        coverage.add(np.array([a for a, _ in pairs]), np.array(ends))
        for (a, _), b in zip(pairs, ends, strict=True):
            if b > max(a, reached):
                merged, reached = merged + b - max(a, reached), b
    assert coverage.seconds == pytest.approx(merged, abs=1e-9)
    assert coverage.until(np.array([0.0, 1000.0])).tolist() == pytest.approx([0.0, merged], abs=1e-9)


def test_spans_as_json_are_those_as_values() -> None:
    """Also beside spans of unknown phases, and beside what are no spans."""
    spans = [[("compute", 0.0, 0.5), ("wait", 0.5, 1.25e0)], [], [("download", 1e-3, 0.75)], [("compute", 1.0, 2.0)]]
    ranks, texts = [3, 0, 5, 3], [json.dumps(some).encode() for some in spans]
    wanted = PhaseLanes()
    for rank, some in zip(ranks, spans, strict=True):
        wanted.add(rank, some)
    none = [b'[["sleep", 0.0, 9.0]]', b'[["compute", [1.0, 2.0]]]', b"null", b'{"compute": [0, 1]}', b'[["compute", 1]]']
    for more in ([], *([text] for text in none)):
        found = PhaseLanes()
        found.add_json([*ranks, *(7 for _ in more)], [*texts, *more])
        assert found.ranks == wanted.ranks == [3, 5]
        assert all(found.totals(rank) == wanted.totals(rank) for rank in (3, 5))
