"""The dashboard's page of a data service that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_worlds import World, mixed, plain, until

pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")

from ephemeron.dashboard.services import Services


@pytest.mark.slow
def test_a_running_data_service_shows_its_flows_and_how_much_they_loaded(one_shard: World, tmp_path: Path) -> None:
    one_shard.address()
    (tmp_path / "data-service").symlink_to(one_shard.folder)
    page = Services([tmp_path])
    with one_shard.read(mixed(name="test/page")).to_shuffled(4, plain) as batches:
        iterator = iter(batches)  # which reads until it is closed
        assert len(next(iterator)) == 4

        def row() -> dict[str, object]:
            (service,) = page.document()
            assert service["running"]
            assert service["problem"] == ""
            return next(flow for flow in service["flows"] if flow["flow"] == "test/page")

        until(lambda: row()["loaded"] and row()["readers"], "loaded samples and readers are counted")
        found = row()
        assert (found["samples"], found["state"], found["readers"], found["shards"]) == (31, "accessed", 1, 1)
    (service,) = page.document()
    history = service["history"]
    assert len(history["t"]) == len(history["loaded"]) >= 2
    assert history["t"] == sorted(history["t"])
