"""Supervisor in a MicroVM: serves the one call of the run hook, and ends the MicroVM.

The snapshot is taken when its process has made its imports. That process runs nothing before the run hook, which brings the
secrets and renews the random state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from ephemeron.errors import ChannelError
from ephemeron.functions.async_invoke.process_supervisor import ProcessSupervisor, pass_output_on
from ephemeron.functions.aws_microvm.api import MicrovmApi
from ephemeron.functions.aws_microvm.endpoint import MICROVM
from ephemeron.functions.aws_microvm.invoker import MicrovmSender
from ephemeron.functions.aws_microvm.payload import RunPayload
from ephemeron.functions.aws_microvm.platform import LIMITS
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, client
from ephemeron.functions.cgroups import Enforcement
from ephemeron.functions.function_process import FunctionProcess, family
from ephemeron.functions.process_messages import Ready
from ephemeron.functions.process_reset import renew_randomness

_log = logging.getLogger(__name__)
_WATCHED = Enforcement(kind="none")
"""The MicroVM has four times the baseline, so the quota is watched: above it memory is billed as a burst."""
_END_TRIES, _END_PAUSE_S = 5, 1.0
_METER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Description of the image, from the environment variables that `cloud deploy` sets."""

    image: str
    memory_mb: int
    """Baseline: quota of the function."""
    digest: str = ""


class MicrovmSupervisor(ProcessSupervisor):
    """Serves one call.

    Args:
        told: of the image.
        folder: for scratch folders and output; its own.
        api: makes the client, after the run hook: the credentials of the role exist only then.
    """

    billing_step_s: ClassVar[float] = 1.0

    def __init__(self, told: ImageSettings, folder: Path, *, api: Callable[[], Awaitable[MicrovmApi]] | None = None) -> None:
        super().__init__(folder, vcpus=LIMITS.vcpus(told.memory_mb), lifetime_s=LIMITS.lifetime_s)
        self._told, self._id = told, ""
        self._burst_vcpu_s = 0.0
        self._make_api = api or self._own_api
        self._payload: RunPayload | None = None

    @property
    def taken(self) -> bool:
        """Whether the run hook has come: it comes once."""
        return self._payload is not None

    def ready(self) -> bool:
        """Whether the process has made its imports.

        Raises:
            RuntimeError: it cannot.
        """
        if self._starting is None or not self._starting.done():
            return False
        first = self._starting.result()
        if not isinstance(first, Ready):
            raise RuntimeError("the function's process has ended" if first is None else first.error)
        return True

    def accept(self, microvm_id: str, payload: RunPayload) -> None:
        """Takes the run hook: from here on this is one MicroVM of many."""
        renew_randomness()
        # A snapshot has no region of its own, which clients of AWS need.
        region = os.environ.get("AWS_REGION") or payload.launch.region
        own = {"AWS_REGION": region, "AWS_DEFAULT_REGION": region, MICROVM: microvm_id}
        self.variables = {**payload.variables, **own}
        os.environ.update(self.variables)
        self._payload, self._id = payload, microvm_id

    async def run(self) -> None:
        """Serves the call, and ends the MicroVM."""
        assert self._payload is not None
        envelope = self._payload.envelope
        metering = asyncio.create_task(self._meter())
        try:
            await self.serve(envelope, request=self._id)
        except ChannelError as e:
            _log.error("the channel cannot be reached from here: %s", e)
        finally:
            metering.cancel()
            await self._end_microvm()

    def burst_vcpu_s(self) -> float:
        return round(self._burst_vcpu_s, 3)

    async def _meter(self) -> None:
        """Adds up CPU time beyond the baseline, second by second, as it is billed."""
        used, since = self._cpu_s(), time.monotonic()
        while True:
            await asyncio.sleep(_METER_S)
            now_used, now = self._cpu_s(), time.monotonic()
            self._burst_vcpu_s += max(0.0, now_used - used - self._vcpus * (now - since))
            used, since = now_used, now

    def _cpu_s(self) -> float:
        """CPU seconds of this process and of all that it has started, those that have ended included."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        total = own.ru_utime + own.ru_stime
        for process in family(os.getpid())[1:]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def make(self, n: int) -> FunctionProcess:
        pass_output_on(self._folder, n)
        return FunctionProcess(_WATCHED, n, memory_mb=self._told.memory_mb, vcpus=self._vcpus, env=os.environ, folder=self._folder)

    def between(self) -> None:
        """No call follows."""

    def sender(self, callback: str, **sender: Any) -> MicrovmSender:
        assert self._payload is not None
        return MicrovmSender(self._settings, self._make_api, self._payload.launch, self._payload.variables, **sender)

    @property
    def _settings(self) -> AwsMicrovmSettings:
        return AwsMicrovmSettings(image=self._told.image, region=os.environ["AWS_REGION"])

    async def _own_api(self) -> MicrovmApi:
        return MicrovmApi(await asyncio.to_thread(client, self._settings))

    async def _end_microvm(self) -> None:
        """Terminates this MicroVM. Where that is refused, the client does it, or the maximum duration."""
        for _ in range(_END_TRIES):
            try:
                return await (await self._make_api()).terminate(self._id)
            except Exception as e:  # noqa: BLE001 - botocore makes its error classes at run time
                _log.warning("this MicroVM cannot terminate itself: %s", e)
            await asyncio.sleep(_END_PAUSE_S)


def told_by(environ: Mapping[str, str]) -> ImageSettings:
    """Reads the environment variables that `cloud deploy` sets.

    Raises:
        KeyError, ValueError: the image was made otherwise.
    """
    return ImageSettings(
        image=environ["EPHEMERON_IMAGE"], memory_mb=int(environ["EPHEMERON_MEMORY_MB"]), digest=environ.get("EPHEMERON_CODE", "")
    )
