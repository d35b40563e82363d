"""The job as a single function runs it, to be probed."""

from __future__ import annotations

import dataclasses

from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.runs import folders
from ephemeron.training.driver.launching.prepare import Prepared, prepare
from ephemeron.training.job import Configuration, Job, PlatformName


def prepared_alone(job: Job, *, channel: str, limits: Limits, platform: PlatformName) -> Prepared:
    """The job as one function would run it; refuses what `train` would refuse."""
    server = channel.startswith(("ps://", "parameter_server"))
    alone = Configuration(
        platform=platform,
        channel=channel,
        pattern="standalone",
        workers=1,
        batch_size=1,
        memory_mb=limits.memory_max_mb,
        function_timeout_s=limits.lifetime_s,
    ).resolved()
    prices = load_prices("server" if server else "cache" if channel.startswith("redis") else "objects", platform=platform)
    free = dataclasses.replace(job.limits, deadline_s=None, budget_usd=None)
    return prepare(
        dataclasses.replace(job, limits=free), alone, run_id=folders.new_run_id(f"profile-{job.name}"), limits=limits, prices=prices
    )
