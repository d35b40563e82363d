"""Platform of AWS Lambda: one client's access to the calls of one run. See `async_invoke`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
from ephemeron.functions.async_invoke.records import RecordKeys, calls_prefix
from ephemeron.functions.aws.invoker import INLINE_BYTES, Sender
from ephemeron.functions.aws.logs import LogReader
from ephemeron.functions.aws.settings import AwsSettings, client
from ephemeron.functions.base import Limits

LIMITS = Limits(payload_bytes=16_000_000)
"""Limits of Lambda: 128 to 10,240 MB, 15 minutes. Calls of more than 1 MB go through the store."""


class AwsPlatform(AsyncInvokePlatform):
    """Functions of one run on AWS Lambda. Made by `open`.

    Args:
        run_dir: folder of the run, for `events.jsonl`, `calls.jsonl` and `logs/`.
        settings: of the function; located.
        limits: of the function; every call has its memory.
        channel: of the run, by a connection of the platform's own, which the platform closes.
        names: of the records.
    """

    name = "aws"

    def __init__(
        self, run_dir: Path, settings: AwsSettings, limits: Limits, channel: Channel, names: RecordKeys, *, inline_bytes: int = INLINE_BYTES
    ) -> None:
        self.settings, self._inline_bytes = settings, inline_bytes
        self.unenforced = (f"A cancelled function ends when it looks, every {settings.every_s:g} s: Lambda cannot end it.",)
        if settings.qualifier:
            self.unenforced += (
                "Calls in one environment of managed instances share its memory: no quota of a single one holds.",
                "The bill is that of Lambda's own capacity; on managed instances, EC2 instances are billed instead.",
            )
        super().__init__(run_dir, limits, channel, names, every_s=settings.every_s)

    def sender(self) -> Sender:
        return Sender(
            self.settings,
            lambda: client(self.settings, "lambda"),
            channel=self._channel,
            names=self._names,
            announce=self._announce,
            inline_bytes=self._inline_bytes,
        )

    @classmethod
    async def open(
        cls,
        run_dir: Path,
        settings: AwsSettings,
        *,
        channel: str,
        run: str,
        limits: Limits = LIMITS,
        inline_bytes: int = INLINE_BYTES,
        logs_since: float | None = None,
    ) -> AwsPlatform:
        """Opens the calls of a run, earlier ones included.

        Args:
            run_dir: made when missing.
            settings: which function; `located` fills in the region.
            channel: address of the run's channel.
            run: its name, which the names of the records begin with.
            limits: see `preflight.inspect`.
            inline_bytes: larger calls go through the store.
            logs_since: Unix time from which logs matter; None: now.

        Raises:
            JobError: no region, or no channel at that address.
            MissingExtra: boto3 or a library of the channel is absent.
        """
        settings = settings.located()
        run_dir.mkdir(parents=True, exist_ok=True)
        names = RecordKeys(calls_prefix(run))
        self = cls(run_dir, settings, limits, open_channel(channel), names, inline_bytes=inline_bytes)
        since = (time.time() if logs_since is None else logs_since) - 60.0
        logs = LogReader(await asyncio.to_thread(client, settings, "logs"), settings, since_ms=int(since * 1000))
        await self.hold(channel, logs)
        return self
