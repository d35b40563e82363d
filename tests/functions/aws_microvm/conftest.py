"""One local MicroVM service, with one image, for all tests of this folder that need nothing of their own of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings
    from ephemeron.testing.microvm_service import MicrovmService


@pytest.fixture(scope="session")
def shared_service() -> Iterator[MicrovmService]:
    from microvm_world import artifact

    from ephemeron.testing.microvm_service import MicrovmService

    with MicrovmService(fetch=artifact) as service:
        yield service


@pytest.fixture(scope="session")
def shared_image(shared_service: MicrovmService) -> AwsMicrovmSettings:
    from microvm_entries import ENTRIES
    from microvm_world import deployed, keys

    with keys():  # the deployed code leaves the kit out: functions find it where this interpreter does
        return deployed(shared_service, entries=ENTRIES, preload="microvm_entries", folder=Path(__file__).parent)


@pytest.fixture(scope="module")
def service(shared_service: MicrovmService) -> Iterator[MicrovmService]:
    """With credentials for it."""
    from microvm_world import keys

    with keys():
        yield shared_service


@pytest.fixture(scope="module")
def settings(service: MicrovmService, shared_image: AwsMicrovmSettings) -> AwsMicrovmSettings:
    """Of image `ephemeron`, which has the kit's entries."""
    return shared_image
