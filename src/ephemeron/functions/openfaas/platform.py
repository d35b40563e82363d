"""The platform itself: one client's hold on the calls of one run. See the package for how it works."""

from __future__ import annotations

from pathlib import Path

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
from ephemeron.functions.async_invoke.records import RecordKeys, calls_prefix
from ephemeron.functions.base import Limits
from ephemeron.functions.openfaas.callbacks import Callbacks
from ephemeron.functions.openfaas.gateway import Gateway
from ephemeron.functions.openfaas.invoker import GatewaySender
from ephemeron.functions.openfaas.settings import OpenFaasSettings

LIMITS = Limits(memory_max_mb=262_144, lifetime_s=86_400.0, payload_bytes=16_000_000, mb_per_vcpu=1769.0, concurrency=1_000)
"""A cluster has none of its own: these only keep mistakes out. Calls of more than 128 kB go through the store."""


class OpenFaasPlatform(AsyncInvokePlatform):
    """Functions of one run on OpenFaaS. Made by `open`.

    Args:
        run_dir: folder of the run, for `events.jsonl` and `calls.jsonl`.
        settings: which function; located.
        limits: what it allows; its memory is what every call has to ask for.
        channel: of the run, by a connection of the platform's own, which the platform closes.
        names: of the records.
        callbacks: listener for the ends of calls; None: there is none.
    """

    name = "openfaas"

    def __init__(
        self,
        run_dir: Path,
        settings: OpenFaasSettings,
        limits: Limits,
        channel: Channel,
        names: RecordKeys,
        *,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.settings, self._callbacks = settings, callbacks
        self.unenforced = (
            f"A cancelled function ends when its handler looks, every {settings.every_s:g} s.",
            *(
                ()
                if callbacks is not None
                else ("The death of a whole replica is noticed by its silence, after its lifetime; give a call-back URL to know at once.",)
            ),
        )
        super().__init__(run_dir, limits, channel, names, every_s=settings.every_s)

    def sender(self) -> GatewaySender:
        return GatewaySender(
            Gateway(self.settings),
            callback="" if self._callbacks is None else self._callbacks.url,
            channel=self._channel,
            names=self._names,
            announce=self._announce,
            every_s=self._every_s,
        )

    @classmethod
    async def open(cls, run_dir: Path, settings: OpenFaasSettings, *, channel: str, run: str, limits: Limits = LIMITS) -> OpenFaasPlatform:
        """Opens the calls of a run, earlier ones included.

        Args:
            run_dir: made when missing.
            settings: which function, and where the queue-worker reaches this machine, if it does.
            channel: address of the run's channel.
            run: its name, which the names of the records begin with.
            limits: see `preflight.inspect`.

        Raises:
            JobError: no URL, no channel at that address, or the port of the call-back is taken.
            MissingExtra: a library of the channel is absent.
        """
        settings = settings.located()
        run_dir.mkdir(parents=True, exist_ok=True)
        callbacks = Callbacks(settings) if settings.callback else None
        if callbacks is not None:
            try:
                await callbacks.open()
            except OSError as e:
                raise JobError(f"cannot listen for call-backs at {settings.callback}: {e.strerror}", remedy="give another port") from None
        self = cls(run_dir, settings, limits, open_channel(channel), RecordKeys(calls_prefix(run)), callbacks=callbacks)
        if callbacks is not None:
            self._stack.push_async_callback(callbacks.close)
        try:
            await self.hold(channel, callbacks)
        except BaseException:
            await self.close()
            raise
        return self
