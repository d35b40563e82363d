"""Addresses, and what of them may be shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ephemeron.communication.channels import MemoryChannel, open_channel, public_address
from ephemeron.communication.channels.address import check_address
from ephemeron.errors import JobError


def test_each_kind_opens_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_CHANNEL_TOKEN", "t")
    assert isinstance(open_channel("memory"), MemoryChannel)
    assert open_channel("folder", base=tmp_path).traits.service == "objects"
    for address, service in [(tmp_path.as_uri(), "objects"), ("s3://b/p", "objects"), ("ps://h:1,h:2", "server")]:
        assert open_channel(address).traits.service == service
    pytest.importorskip("redis", reason="no cache client; pip install 'ephemeron[cache]'")
    assert open_channel("rediss://h:1/2").traits.service == "cache"


@pytest.mark.parametrize("address", ["", "ftp://x", "s3:bucket", "Memory", "folder://x"])
def test_an_unknown_address_lists_the_known_ones(address: str) -> None:
    with pytest.raises(JobError, match=r"memory, folder, file:///path, s3://"):
        open_channel(address)


def test_a_relative_folder_is_refused_with_the_whole_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = (tmp_path / "a b").as_uri()
    for address in ("file://a%20b", "direct+file://a%20b", "a b", "./a b"):
        with pytest.raises(JobError, match=re.escape(whole)):
            check_address(address)
    for address in (whole, f"direct+{whole}", "memory", "folder", "direct", "s3://bucket", "redis://h:1"):
        check_address(address)


def test_a_folder_needs_a_base() -> None:
    with pytest.raises(JobError, match="base folder"):
        open_channel("folder")


@pytest.mark.parametrize(
    ("address", "public", "env"),
    [
        ("memory", "memory", {}),
        ("s3://bucket/prefix", "s3://bucket/prefix", {}),
        ("file:///a%20b/c?d", "file:///a%20b/c?d", {}),
        ("redis://:p%40ss@h:1/2", "redis://h:1/2", {"EPHEMERON_CHANNEL_PASSWORD": "p@ss"}),
        ("rediss://ann:p@h:1/2", "rediss://h:1/2", {"EPHEMERON_CHANNEL_USER": "ann", "EPHEMERON_CHANNEL_PASSWORD": "p"}),
        ("redis://h:1?db=2&password=p", "redis://h:1?db=2", {"EPHEMERON_CHANNEL_PASSWORD": "p"}),
        ("ps://tok@h:1,h:2", "ps://h:1,h:2", {"EPHEMERON_CHANNEL_TOKEN": "tok"}),
        ("ps://:tok@h:1", "ps://h:1", {"EPHEMERON_CHANNEL_TOKEN": "tok"}),
        ("s3://id:key@b/p", "s3://b/p", {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}),
    ],
)
def test_secrets_leave_the_address(address: str, public: str, env: dict[str, str]) -> None:
    assert public_address(address) == (public, env)


def test_an_unknown_address_with_a_password_is_not_shown() -> None:
    with pytest.raises(JobError) as caught:
        open_channel("ftp://me:verysecret@host/")
    assert "verysecret" not in str(caught.value)


def test_importing_the_port_imports_no_backend() -> None:
    code = "import sys, ephemeron.communication.channels; print([m for m in ('obstore','redis','numpy','asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['asyncio']"
