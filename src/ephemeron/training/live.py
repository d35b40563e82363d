"""The platforms on which functions live on their own, as `train`, `attach`, `resume` and `stop` take hold of them.

What a run was started on is in its record (`run.json`): `platform`, and for clouds which function, where. No secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from ephemeron.errors import JobError
from ephemeron.events import RunEnded, RunStarted, from_json
from ephemeron.job import Configuration
from ephemeron.platforms.base import Limits
from ephemeron.training.home import RunFolder

if TYPE_CHECKING:
    from ephemeron.platforms.aws.platform import AwsPlatform
    from ephemeron.platforms.aws.settings import AwsSettings
    from ephemeron.platforms.lithops.platform import LithopsPlatform
    from ephemeron.platforms.lithops.settings import LithopsSettings
    from ephemeron.platforms.local import LocalPlatform
    from ephemeron.platforms.openfaas.platform import OpenFaasPlatform
    from ephemeron.platforms.openfaas.settings import OpenFaasSettings
    from ephemeron.platforms.ray.platform import RayPlatform
    from ephemeron.platforms.ray.settings import RaySettings
    from ephemeron.platforms.recorded.platform import RecordedPlatform

AWS_COLD_START_S = 10.0
"""Until a function of a PyTorch image runs its code: the lead that successors get."""

CLOUDS = ("aws", "openfaas", "ray", "lithops")
"""Where functions go on without any process of this machine."""
OPENFAAS_COLD_START_S = 5.0
"""The same where replicas wait with their imports made; what the queue takes to try again is in it."""
RAY_COLD_START_S = 6.0
"""The same for an actor: Ray's process, then ours with PyTorch."""
LITHOPS_COLD_START_S = 15.0
"""The same for a call of Lithops: its storage, its runtime, then ours with PyTorch."""
RAY_LIFETIME_S = 3600.0
"""Of one invocation on Ray, where nobody says: Ray has no limit, and a hand-over now and then keeps work movable."""
SPARE = 1
"""Replicas beside those of the workers, for a successor that comes while its predecessor still runs."""


class NotRunning(Exception):
    """Nothing of the run lives any more."""


async def start(folder: RunFolder, run: dict[str, Any], secrets: dict[str, str]) -> LocalPlatform | RecordedPlatform:
    """A platform to launch or resume the run on.

    Raises:
        PlatformError: it cannot be had.
        JobError: the function has become another one since.
    """
    if run["platform"] == "aws":
        return await _aws(folder, run, starting=True)
    if run["platform"] == "openfaas":
        return await _openfaas(folder, run, starting=True)
    if run["platform"] == "ray":
        return await _ray(folder, run)
    if run["platform"] == "lithops":
        return await _lithops(folder, run)
    from ephemeron.platforms.local import LocalPlatform

    return await LocalPlatform.start(folder.path, env=secrets)


async def attach(folder: RunFolder, run: dict[str, Any]) -> LocalPlatform | RecordedPlatform:
    """The platform that the run is on.

    Raises:
        NotRunning: it is over.
    """
    if run["platform"] in CLOUDS:
        if _is_over(folder):
            raise NotRunning
        if run["platform"] == "ray":
            return await _ray(folder, run)
        if run["platform"] == "lithops":
            return await _lithops(folder, run)
        return await (_aws(folder, run) if run["platform"] == "aws" else _openfaas(folder, run))
    from ephemeron.platforms.local import HostGone, LocalPlatform

    try:
        return await LocalPlatform.attach(folder.path)
    except HostGone:
        raise NotRunning from None


def on_aws(c: Configuration, settings: AwsSettings, secrets: dict[str, str]) -> tuple[Configuration, Limits]:
    """Asks AWS what there is, and refuses what does not fit it. Memory and lifetime default to the function's.

    Args:
        c: resolved; its channel without credentials.
        settings: located.
        secrets: that the channel's address held.

    Raises:
        JobError, PlanInfeasible: one line each; nothing has been started.
    """
    from ephemeron.platforms.aws import preflight
    from ephemeron.platforms.release import digest

    preflight.check_channel(c.channel, settings, secrets)
    deployed = preflight.inspect(settings)
    preflight.check_code(deployed, settings, digest())
    c = dataclasses.replace(
        c, memory_mb=c.memory_mb or deployed.memory_mb, lifetime_s=c.lifetime_s or float(deployed.timeout_s)
    )
    preflight.check_fit(deployed, settings, workers=c.workers, memory_mb=c.memory_mb, lifetime_s=c.lifetime_s)
    return c, deployed.limits


def on_openfaas(c: Configuration, settings: OpenFaasSettings, secrets: dict[str, str]) -> tuple[Configuration, Limits]:
    """Asks the gateway what there is, and refuses what does not fit it. Memory and lifetime default to the function's.

    Args:
        c: resolved; its channel without credentials.
        settings: located.
        secrets: that the channel's address held.

    Raises:
        JobError, PlanInfeasible: one line each; nothing has been started.
    """
    from ephemeron.platforms.openfaas import preflight
    from ephemeron.platforms.release import digest

    preflight.check_channel(c.channel, settings, secrets)
    deployed = preflight.inspect(settings)
    c = dataclasses.replace(
        c, memory_mb=c.memory_mb or deployed.memory_mb, lifetime_s=c.lifetime_s or deployed.lifetime_s
    )
    preflight.check_fit(
        deployed, settings, workers=c.workers, memory_mb=c.memory_mb, lifetime_s=c.lifetime_s, digest=digest()
    )
    return c, deployed.limits


def on_ray(c: Configuration, settings: RaySettings, secrets: dict[str, str]) -> tuple[Configuration, Limits]:
    """Asks the cluster and each of its nodes, and refuses what does not fit them. Memory defaults to that of one CPU.

    Args:
        c: resolved; its channel without credentials.
        settings: located.
        secrets: that the channel's address held.

    Raises:
        JobError, PlanInfeasible, MissingExtra: one line each; nothing has been started.
    """
    from ephemeron.platforms.ray import preflight

    preflight.check_channel(c.channel, secrets)
    c = dataclasses.replace(
        c, memory_mb=c.memory_mb or int(settings.mb_per_vcpu), lifetime_s=c.lifetime_s or RAY_LIFETIME_S
    )
    found = preflight.inspect(settings, c.channel)
    preflight.check_fit(found, settings, workers=c.workers, memory_mb=c.memory_mb)
    return c, preflight.limits_of(found, settings, memory_mb=c.memory_mb)


def on_lithops(c: Configuration, settings: LithopsSettings, secrets: dict[str, str]) -> tuple[Configuration, Limits]:
    """Refuses what cannot work on a backend of Lithops. Memory defaults to that of one CPU, lifetime to the longest.

    Args:
        c: resolved; its channel without credentials.
        settings: checked.
        secrets: that the channel's address held.

    Raises:
        JobError, PlanInfeasible, MissingExtra: one line each; nothing has been started.
    """
    from ephemeron.platforms.lithops import preflight
    from ephemeron.platforms.lithops.platform import limits_of

    preflight.check_channel(c.channel, settings, secrets)
    preflight.check_places(settings, workers=c.workers)
    c = dataclasses.replace(
        c, memory_mb=c.memory_mb or int(settings.mb_per_vcpu), lifetime_s=c.lifetime_s or settings.lifetime_s
    )
    return c, limits_of(settings)


async def _lithops(folder: RunFolder, run: dict[str, Any]) -> LithopsPlatform:
    from ephemeron.platforms.lithops.platform import LithopsPlatform
    from ephemeron.platforms.lithops.settings import LithopsSettings

    try:
        settings = LithopsSettings(**run["lithops"]).checked()
    except (KeyError, TypeError) as e:
        raise JobError(f"run.json of {folder.run_id} does not say which backend it runs on: {e}") from None
    return await LithopsPlatform.open(folder.path, settings, channel=run["address"], run=run["run_id"])


async def _ray(folder: RunFolder, run: dict[str, Any]) -> RayPlatform:
    from ephemeron.platforms.ray import preflight
    from ephemeron.platforms.ray.platform import RayPlatform
    from ephemeron.platforms.ray.settings import RaySettings

    try:
        settings = RaySettings(**run["ray"]).located()
        memory_mb = Configuration(**run["configuration"]).memory_mb
    except (KeyError, TypeError) as e:
        raise JobError(f"run.json of {folder.run_id} does not say which cluster it runs on: {e}") from None
    found = await asyncio.to_thread(preflight.inspect, settings, run["address"], probe=False)
    limits = preflight.limits_of(found, settings, memory_mb=memory_mb)
    return await RayPlatform.open(folder.path, settings, channel=run["address"], run=run["run_id"], limits=limits)


async def _openfaas(folder: RunFolder, run: dict[str, Any], *, starting: bool = False) -> OpenFaasPlatform:
    from ephemeron.platforms.openfaas import preflight
    from ephemeron.platforms.openfaas.platform import OpenFaasPlatform
    from ephemeron.platforms.openfaas.settings import OpenFaasSettings
    from ephemeron.platforms.release import digest

    try:
        settings = OpenFaasSettings(**run["openfaas"]).located()
        c = Configuration(**run["configuration"])
    except (KeyError, TypeError) as e:
        raise JobError(f"run.json of {folder.run_id} does not say which function it runs on: {e}") from None
    deployed = await asyncio.to_thread(preflight.inspect, settings)
    if starting:
        preflight.check_fit(
            deployed, settings, workers=c.workers, memory_mb=c.memory_mb, lifetime_s=c.lifetime_s, digest=digest()
        )
        await asyncio.to_thread(preflight.make_ready, settings, deployed, replicas=c.workers + SPARE)
    return await OpenFaasPlatform.open(
        folder.path, settings, channel=run["address"], run=run["run_id"], limits=deployed.limits
    )


async def _aws(folder: RunFolder, run: dict[str, Any], *, starting: bool = False) -> AwsPlatform:
    from ephemeron.platforms.aws import preflight
    from ephemeron.platforms.aws.platform import AwsPlatform
    from ephemeron.platforms.aws.settings import AwsSettings
    from ephemeron.platforms.release import digest

    try:
        settings = AwsSettings(**run["aws"]).located()
    except (KeyError, TypeError) as e:
        raise JobError(f"run.json of {folder.run_id} does not say which function it runs on: {e}") from None
    deployed = await asyncio.to_thread(preflight.inspect, settings)
    if starting:
        preflight.check_code(deployed, settings, digest())
    return await AwsPlatform.open(
        folder.path, settings, channel=run["address"], run=run["run_id"], limits=deployed.limits,
        logs_since=run["wall_time"],
    )  # fmt: skip


def _is_over(folder: RunFolder) -> bool:
    """Whether the latest launch or resume has ended for a client that watched."""
    over = False
    with contextlib.suppress(FileNotFoundError), folder.events.open() as lines:
        for line in lines:
            if '"kind":"run_' in line:
                with contextlib.suppress(ValueError, TypeError):
                    event = from_json(line)
                    over = isinstance(event, RunEnded) if isinstance(event, (RunEnded, RunStarted)) else over
    return over
