"""Platform profiles, measured once and reused: `HOME/platforms/NAME-CHANNEL.json`.

A profile holds for the machine it was measured on. One of another machine (a home folder that is shared, a container
that got other cores) is measured anew, never used silently.
"""

from __future__ import annotations

import json
import logging
import platform as machine
from dataclasses import dataclass
from pathlib import Path

from ephemeron.communication.channels.credentials import public_address
from ephemeron.config import typed
from ephemeron.config.paths import cores, replace_file
from ephemeron.errors import JobError
from ephemeron.runs import folders
from ephemeron.training.planner.model.profile import PlatformProfile, parse_platform
from ephemeron.training.planner.model.provenance import PlatformProvenance

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A platform's profile, and how it was measured."""

    platform: PlatformProfile
    fit: PlatformProvenance
    reused: bool = False


def this_machine() -> str:
    """Description of the machine that a measurement depends on."""
    return f"{machine.system()} {machine.machine()}, {_processor()}, {cores()} cores"


def path_of(name: str, channel: str) -> Path:
    """Path of the profile."""
    public, _ = public_address(channel)
    safe = "".join(c if c.isascii() and c.isalnum() else "-" for c in public).strip("-")
    return folders.home() / "platforms" / f"{name}-{safe}.json"


def load(name: str, channel: str) -> Known | None:
    """The profile of this machine, or None."""
    path = path_of(name, channel)
    try:
        raw = json.loads(path.read_text())
        if raw["machine"] != this_machine():
            _log.info("%s was measured on another machine, and is not reused", path)
            return None
        if "links" not in raw["platform"]:
            _log.info("%s is of an earlier release, and is not reused", path)
            return None
        fit = typed.build(PlatformProvenance, raw["fit"], where=f"{path}: fit")
        return Known(platform=parse_platform(raw["platform"], where=f"{path}: platform"), fit=fit, reused=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, JobError) as e:
        _log.info("%s is not reused, the platform is measured again: %s", path, e)
        return None


def save(name: str, channel: str, known: Known) -> None:
    """Keeps a profile.

    Raises:
        JobError: the home folder cannot be written.
    """
    path = path_of(name, channel)
    value = {"machine": this_machine(), "platform": typed.plain(known.platform), "fit": typed.plain(known.fit)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(value, indent=2) + "\n")
        _log.info("kept the platform's profile in %s", path)
    except OSError as e:
        raise JobError(f"cannot write {path}: {e.strerror}", remedy="set EPHEMERON_HOME to a folder you can write") from None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return machine.processor() or "unknown processor"
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "unknown processor")
