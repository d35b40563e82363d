"""Deployed functions, images as folders, and the quantities of Kubernetes."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|k|K|M|G|m)?")
_UNITS = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class GatewayApiError(Exception):
    """An answer that is no success, as plain text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Image of a container."""

    folder: Path
    variables: Mapping[str, str]
    """Environment of its ENV lines; the image's `/home/app` is `folder` here."""

    @classmethod
    def of(cls, folder: Path) -> Image:
        """Reads a recipe.

        Raises:
            ValueError: there is no Dockerfile, or it has no ENV fprocess.
        """
        path = folder / "Dockerfile"
        if not path.exists():
            raise ValueError(f"there is no Dockerfile in {folder}")
        variables: dict[str, str] = {}
        for line in path.read_text().splitlines():
            if line.startswith("ENV "):
                variables |= dict(word.split("=", 1) for word in shlex.split(line[4:]))
        if "fprocess" not in variables:
            raise ValueError(f"{path} sets no fprocess")
        return cls(folder=folder, variables={k: v.replace("/home/app", str(folder)) for k, v in variables.items()})


@dataclass(kw_only=True)
class GatewayFunction:
    """One deployed function."""

    name: str
    image: str
    replicas: int
    variables: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    limits: dict[str, str] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)
    process: str = ""
    created_at: float = 0.0
    invocations: int = 0
    revision: int = 0

    @property
    def memory_mb(self) -> int:
        """Limit, MiB; 0: none."""
        return int(quantity(self.limits["memory"]) / 2**20) if self.limits.get("memory") else 0

    @property
    def cpus(self) -> float | None:
        """Limit, in cores; None: none."""
        return cores(self.limits["cpu"]) if self.limits.get("cpu") else None

    def describe(self, *, available: int) -> dict[str, object]:
        """`FunctionStatus` of the API."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.created_at))
        return {
            "name": self.name,
            "image": self.image,
            "namespace": "openfaas-fn",
            "envProcess": self.process,
            "envVars": self.variables,
            "labels": self.labels,
            "annotations": self.annotations,
            "secrets": self.secrets,
            "limits": self.limits or None,
            "requests": self.requests or None,
            "invocationCount": self.invocations,
            "replicas": self.replicas,
            "availableReplicas": available,
            "createdAt": stamp,
        }


def parse(value: Mapping[str, Any], *, known_secrets: frozenset[str]) -> GatewayFunction:
    """A `FunctionDeployment`.

    Raises:
        GatewayApiError: 400, with the reason.
    """
    name, image = str(value.get("service") or ""), str(value.get("image") or "")
    if not _NAME.fullmatch(name):
        raise GatewayApiError(400, f"validation failed: service: ({name}) is invalid, must be a valid DNS entry")
    if not image:
        raise GatewayApiError(400, "validation failed: image is required")
    texts: dict[str, dict[str, str]] = {}
    for key in ("envVars", "labels", "annotations", "limits", "requests"):
        texts[key] = value.get(key) or {}
        if not isinstance(texts[key], dict) or not all(isinstance(v, str) for v in texts[key].values()):
            raise GatewayApiError(400, f"unable to unmarshal request: {key} is a map of strings")
    if missing := [s for s in value.get("secrets") or () if s not in known_secrets]:
        raise GatewayApiError(400, f"unable to find secret: {missing[0]}")
    for kind in ("limits", "requests"):
        try:
            quantity(texts[kind].get("memory") or "0"), cores(texts[kind].get("cpu") or "0")
        except ValueError as e:
            raise GatewayApiError(400, f"{kind}: {e}") from None
    try:
        replicas = max(1, int(texts["labels"].get("com.openfaas.scale.min", "1")))
    except ValueError:
        raise GatewayApiError(400, "label com.openfaas.scale.min is no number") from None
    return GatewayFunction(
        name=name,
        image=image,
        replicas=replicas,
        variables=texts["envVars"],
        labels=texts["labels"],
        annotations=texts["annotations"],
        secrets=list(value.get("secrets") or ()),
        limits=texts["limits"],
        requests=texts["requests"],
        process=str(value.get("envProcess") or ""),
        created_at=time.time(),
    )


def quantity(text: str) -> float:
    """Bytes: `"128Mi"`, `"128M"`.

    >>> quantity("1Ki")
    1024.0
    """
    found = _MEMORY.fullmatch(text)
    if found is None or found[2] == "m":
        raise ValueError(f"quantities must match the regular expression, {text!r} does not")
    return float(found[1]) * _UNITS[found[2] or ""]


def cores(text: str) -> float:
    """CPU cores: `"500m"`, `"0.5"`.

    >>> cores("250m")
    0.25
    """
    found = _MEMORY.fullmatch(text)
    if found is None or found[2] not in (None, "m"):
        raise ValueError(f"quantities must match the regular expression, {text!r} does not")
    return float(found[1]) / (1000 if found[2] else 1)


def seconds(text: str, default: float) -> float:
    """A Go duration, or whole seconds, as of-watchdog reads both.

    >>> seconds("1m30s", 0.0), seconds("20", 0.0), seconds("soon", 30.0)
    (90.0, 20.0, 30.0)
    """
    if text.isdecimal():
        return float(text)
    parts = _DURATION.findall(text)
    if not parts or "".join(n + unit for n, unit in parts) != text:
        return default
    return sum(float(n) * _SECONDS[unit] for n, unit in parts)
