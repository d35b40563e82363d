"""Images: versions that are made of a ZIP with a Dockerfile, whose command is started once and has to become ready."""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ephemeron.testing.microvm_service.model import ServiceError

BASELINES_MB = (512, 1024, 2048, 4096, 8192)
DEFAULT_MB = 2048
BURST = 4
"""Memory and CPU that a MicroVM may have at most, as a multiple of its baseline."""


@dataclass(kw_only=True)
class ImageVersion:
    """One version of an image."""

    number: str
    request: Mapping[str, Any]
    folder: Path
    created_at: float
    state: str = "PENDING"
    status: str = "ACTIVE"
    reason: str = ""
    command: tuple[str, ...] = ()

    @property
    def memory_mb(self) -> int:
        """Its baseline: the smallest that has the wanted memory."""
        wanted = [int(r["minimumMemoryInMiB"]) for r in self.request.get("resources", ())]
        least = max(wanted, default=DEFAULT_MB)
        return next((mb for mb in BASELINES_MB if mb >= least), BASELINES_MB[-1])

    @property
    def hooks(self) -> Mapping[str, Any]:
        """Hooks that are called, and their time limits."""
        wanted: Mapping[str, Any] = self.request.get("hooks", {})
        return {**wanted.get("microvmHooks", {}), **wanted.get("microvmImageHooks", {})}

    def described(self) -> dict[str, Any]:
        """What was asked for, without what names the image."""
        left_out = ("name", "clientToken", "imageIdentifier", "tags")
        return {key: value for key, value in self.request.items() if key not in left_out}


@dataclass(kw_only=True)
class Image:
    """An image and its versions, oldest first."""

    name: str
    arn: str
    created_at: float
    state: str = "CREATING"
    versions: list[ImageVersion] = field(default_factory=list)
    tags: Mapping[str, str] = field(default_factory=dict)

    def active(self) -> ImageVersion | None:
        """The newest version that can be run."""
        fit = [v for v in self.versions if (v.state, v.status) == ("SUCCESSFUL", "ACTIVE")]
        return fit[-1] if fit else None

    def version(self, number: str) -> ImageVersion:
        """A version by its number.

        Raises:
            ServiceError: there is none.
        """
        for version in self.versions:
            if version.number == number:
                return version
        raise ServiceError("ResourceNotFoundException", f"image {self.name} has no version {number}")

    def summary(self) -> dict[str, Any]:
        """Members that several answers have."""
        out: dict[str, Any] = {"imageArn": self.arn, "name": self.name, "state": self.state, "createdAt": self.created_at}
        if (active := self.active()) is not None:
            out["latestActiveImageVersion"] = active.number
        failed = [v for v in self.versions if v.state == "FAILED"]
        return {**out, "latestFailedImageVersion": failed[-1].number} if failed else out


class Images:
    """All images of the account.

    Args:
        folder: for their files.
        region: of their ARNs.
        account: likewise.
    """

    def __init__(self, folder: Path, region: str, account: str) -> None:
        self.by_arn: dict[str, Image] = {}
        self._folder, self._prefix = folder, f"arn:aws:lambda:{region}:{account}:microvm-image:"

    def find(self, identifier: str) -> Image:
        """An image by its ARN.

        Raises:
            ServiceError: there is none.
        """
        if identifier not in self.by_arn:
            raise ServiceError("ResourceNotFoundException", f"image {identifier} does not exist")
        return self.by_arn[identifier]

    def create(self, request: Mapping[str, Any]) -> tuple[Image, ImageVersion]:
        """A new image, to be built.

        Raises:
            ServiceError: the name is taken.
        """
        arn = self._prefix + request["name"]
        if arn in self.by_arn:
            raise ServiceError("ConflictException", f"image {request['name']} exists")
        image = Image(name=request["name"], arn=arn, created_at=time.time(), tags=request.get("tags", {}))
        self.by_arn[arn] = image
        return image, self.add_version(image, request)

    def add_version(self, image: Image, request: Mapping[str, Any]) -> ImageVersion:
        """Another version, to be built."""
        number = f"{len(image.versions) + 1}.0"
        folder = self._folder / image.name / number
        made = ImageVersion(number=number, request=request, folder=folder, created_at=time.time())
        image.versions.append(made)
        return made


def unpack(data: bytes, folder: Path) -> tuple[str, ...]:
    """Unpacks the ZIP of an image, and returns the command of its Dockerfile.

    Raises:
        ServiceError: it is no ZIP, or its Dockerfile is missing, has no base image or no command.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(folder)
        lines = (folder / "Dockerfile").read_text().splitlines()
    except (zipfile.BadZipFile, OSError) as e:
        raise ServiceError("ValidationException", f"the code artifact has no Dockerfile at its root: {e}") from None
    commands = [json.loads(line[4:]) for line in lines if line.startswith("CMD [")]
    if not any(line.startswith("FROM ") for line in lines) or not commands:
        raise ServiceError("ValidationException", "the Dockerfile has no FROM, or no CMD in its list form")
    return tuple(commands[-1])
