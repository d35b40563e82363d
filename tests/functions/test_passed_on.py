"""What functions of this machine see of their client."""

from __future__ import annotations

import os

from ephemeron.functions.passed_on import daemon_environment


def test_the_store_of_datasets_is_the_clients(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EPHEMERON_DATASETS_STORE", raising=False)
    monkeypatch.setenv("EPHEMERON_HOME", "home")
    assert daemon_environment({})["EPHEMERON_DATASETS_STORE"] == os.path.join(tmp_path, "home", "datasets-store")
    monkeypatch.setenv("EPHEMERON_DATASETS_STORE", "s3://bucket/store")
    assert daemon_environment({})["EPHEMERON_DATASETS_STORE"] == "s3://bucket/store"
