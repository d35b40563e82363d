"""The functions that exist: what CreateFunction and its relatives keep, with the limits of AWS Lambda."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import shutil
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ephemeron.communication.rpc.http import Response, json_response
from ephemeron.units import MIB

ACCOUNT = "123456789012"
MOST_ZIPPED = 50 * MIB
"""Bytes of a ZIP that is uploaded directly."""
MOST_UNZIPPED = 250 * MIB
EVENT_AGE_S = 21_600.0
RETRIES = 2
"""Retries of a failed asynchronous call by default."""


class LambdaApiError(Exception):
    """Error answer of the service: status, type and text."""

    def __init__(self, status: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.status, self.kind = status, kind

    def response(self) -> Response:
        """The answer in the format of the Lambda API."""
        body = {"__type": self.kind, "Type": "User" if self.status < 500 else "Service", "Message": str(self), "message": str(self)}
        return json_response(body, status=self.status, headers={"x-amzn-ErrorType": self.kind})


@dataclass(kw_only=True)
class LambdaFunction:
    """One deployed function."""

    name: str
    arn: str
    role: str
    package: str
    """`Zip` or `Image`."""
    handler: str = ""
    runtime: str = ""
    image: str = ""
    memory_mb: int = 128
    timeout_s: int = 3
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    """Folder with the unzipped code."""
    code_size: int = 0
    code_sha256: str = ""
    revision: int = 0
    """Grows with every change; environments of older revisions are ended."""
    retries: int = RETRIES
    event_age_s: float = EVENT_AGE_S
    events_configured: bool = False
    reserved: int | None = None
    recursion: str = "Terminate"
    modified: float = field(default_factory=time.time)
    extras: dict[str, object] = field(default_factory=dict)
    """Settings that are stored and returned without effect."""

    published: bool = False
    """Whether `$LATEST.PUBLISHED` exists."""

    @property
    def calls(self) -> int:
        """Calls in one environment of managed instances; 0: it does not run on any."""
        found = self.extras.get("CapacityProviderConfig")
        inner = found.get("LambdaManagedInstancesCapacityProviderConfig") if isinstance(found, Mapping) else None
        return int(inner.get("PerExecutionEnvironmentMaxConcurrency", 1)) if isinstance(inner, Mapping) else 0

    @property
    def log_group(self) -> str:
        logging = self.extras.get("LoggingConfig")
        group = logging.get("LogGroup") if isinstance(logging, Mapping) else None
        return str(group) if group else f"/aws/lambda/{self.name}"

    def describe(self, *, state: str = "Active", update: str = "Successful") -> dict[str, object]:
        """A FunctionConfiguration."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000+0000", time.gmtime(self.modified))
        out: dict[str, object] = {
            "FunctionName": self.name,
            "FunctionArn": self.arn,
            "Role": self.role,
            "CodeSize": self.code_size,
            "CodeSha256": self.code_sha256,
            "Timeout": self.timeout_s,
            "MemorySize": self.memory_mb,
            "LastModified": stamp,
            "Version": "$LATEST",
            "PackageType": self.package,
            "State": state,
            "LastUpdateStatus": update,
            "RevisionId": str(self.revision),
            "Environment": {"Variables": self.environment},
            "EphemeralStorage": {"Size": 512},
            "Architectures": ["x86_64"],
            **self.extras,
        }
        if self.package == "Zip":
            out |= {"Handler": self.handler, "Runtime": self.runtime}
        return out


class Functions:
    """All functions of one account and region.

    Args:
        folder: for unzipped code.
        region: in their names.
    """

    def __init__(self, folder: Path, region: str) -> None:
        self._folder, self._region = folder, region
        self.memory_quota_mb = 10_240
        """Of the account; new ones have 3,008."""
        self._all: dict[str, LambdaFunction] = {}

    def find(self, name: str) -> LambdaFunction:
        """A function by name or ARN.

        Raises:
            LambdaApiError: there is none.
        """
        short = name.split(":function:")[-1].split(":")[0]
        if short not in self._all:
            raise LambdaApiError(404, "ResourceNotFoundException", f"Function not found: {self._arn(short)}")
        return self._all[short]

    def create(self, wanted: Mapping[str, Any]) -> LambdaFunction:
        """CreateFunction.

        Raises:
            LambdaApiError: it exists, or a value is out of range.
        """
        name = str(wanted["FunctionName"])
        if name in self._all:
            raise LambdaApiError(409, "ResourceConflictException", f"Function already exist: {name}")
        function = LambdaFunction(name=name, arn=self._arn(name), role=str(wanted["Role"]), package=str(wanted.get("PackageType", "Zip")))
        self._configure(function, wanted)
        self._take_code(function, wanted.get("Code", {}))
        function.published = wanted.get("PublishTo") == "LATEST_PUBLISHED"
        self._all[name] = function
        return function

    def configure(self, name: str, wanted: Mapping[str, Any]) -> LambdaFunction:
        """UpdateFunctionConfiguration."""
        function = dataclasses.replace(self.find(name))
        self._configure(function, wanted)
        return self._replace(function)

    def update_code(self, name: str, wanted: Mapping[str, Any]) -> LambdaFunction:
        """UpdateFunctionCode."""
        function = dataclasses.replace(self.find(name))
        self._take_code(function, wanted)
        function.published = function.published or wanted.get("PublishTo") == "LATEST_PUBLISHED"
        return self._replace(function)

    def delete(self, name: str) -> LambdaFunction:
        """DeleteFunction."""
        return self._all.pop(self.find(name).name)

    def __iter__(self) -> Any:
        return iter(self._all.values())

    def _replace(self, function: LambdaFunction) -> LambdaFunction:
        function.revision += 1
        function.modified = time.time()
        self._all[function.name] = function
        return function

    def _arn(self, name: str) -> str:
        return f"arn:aws:lambda:{self._region}:{ACCOUNT}:function:{name}"

    def _configure(self, function: LambdaFunction, wanted: Mapping[str, Any]) -> None:
        memory, timeout = (int(wanted.get("MemorySize", function.memory_mb)), int(wanted.get("Timeout", function.timeout_s)))
        managed = bool(wanted.get("CapacityProviderConfig") or function.calls)
        most_mb, most_s = (32_768, 5_400) if managed else (10_240, 900)
        if not 128 <= memory <= most_mb:
            raise _invalid(
                f"1 validation error detected: Value '{memory}' at 'memorySize' failed to satisfy constraint: "
                f"Member must have value between 128 and {most_mb}"
            )
        if memory > self.memory_quota_mb and not managed:
            raise _invalid(
                f"'MemorySize' value failed to satisfy constraint: Member must have value less than or equal to {self.memory_quota_mb}"
            )
        if not 1 <= timeout <= most_s:
            raise _invalid(
                f"1 validation error detected: Value '{timeout}' at 'timeout' failed to satisfy constraint: "
                f"Member must have value between 1 and {most_s}"
            )
        function.memory_mb, function.timeout_s = memory, timeout
        function.handler = str(wanted.get("Handler", function.handler))
        function.runtime = str(wanted.get("Runtime", function.runtime))
        function.role = str(wanted.get("Role", function.role))
        if "Environment" in wanted:
            function.environment = dict(wanted["Environment"].get("Variables", {}))
        kept = ("Description", "VpcConfig", "Layers", "LoggingConfig", "ImageConfig", "Architectures", "CapacityProviderConfig")
        function.extras = function.extras | {name: wanted[name] for name in kept if name in wanted}

    def _take_code(self, function: LambdaFunction, code: Mapping[str, Any]) -> None:
        if "ImageUri" in code:
            function.image = str(code["ImageUri"])
            function.code_sha256 = hashlib.sha256(function.image.encode()).hexdigest()
            return
        if "ZipFile" not in code:
            raise _invalid("this service takes code as ZipFile or ImageUri only")
        data = base64.b64decode(code["ZipFile"])
        if len(data) > MOST_ZIPPED:
            raise LambdaApiError(413, "RequestEntityTooLargeException", f"Request must be smaller than {MOST_ZIPPED} bytes")
        function.folder = self._unzip(function, data)
        function.code_size = len(data)
        function.code_sha256 = base64.b64encode(hashlib.sha256(data).digest()).decode()

    def _unzip(self, function: LambdaFunction, data: bytes) -> Path:
        folder = self._folder / f"{function.name}-{hashlib.sha256(data).hexdigest()[:16]}"
        if folder.exists():
            return folder
        try:
            archive = zipfile.ZipFile(io.BytesIO(data))
        except zipfile.BadZipFile:
            raise _invalid("Could not unzip uploaded file. Please check your file, then try to upload again.") from None
        size = sum(entry.file_size for entry in archive.infolist())
        if size > MOST_UNZIPPED:
            raise _invalid(f"Unzipped size must be smaller than {MOST_UNZIPPED} bytes")
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        archive.extractall(part)
        part.rename(folder)
        return folder


def _invalid(text: str) -> LambdaApiError:
    return LambdaApiError(400, "InvalidParameterValueException", text)
