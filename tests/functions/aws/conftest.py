"""One local Lambda service for all tests of this folder that need nothing of their own of it; each module has functions of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ephemeron.functions.aws.settings import AwsSettings
    from ephemeron.testing.lambda_service import LambdaService


@pytest.fixture(scope="session")
def shared_service() -> Iterator[LambdaService]:
    from ephemeron.testing.lambda_service import LambdaService

    with LambdaService(concurrency=20) as service:
        yield service


@pytest.fixture(scope="session")
def shared_function(shared_service: LambdaService) -> AwsSettings:
    from aws_world import deployed, keys
    from kit_entry import ENTRIES

    with keys():  # the deployed code leaves the kit out: functions find it where this interpreter does
        return deployed(shared_service, entries=ENTRIES, folder=Path(__file__).parent)


@pytest.fixture(scope="module")
def service(shared_service: LambdaService) -> Iterator[LambdaService]:
    """With credentials for it."""
    from aws_world import keys

    with keys():
        yield shared_service


@pytest.fixture(scope="module")
def settings(service: LambdaService, shared_function: AwsSettings) -> AwsSettings:
    """Of function `ephemeron`, which has the kit's entries."""
    return shared_function
