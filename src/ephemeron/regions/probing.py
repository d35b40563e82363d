"""Measured links between regions: `ephemeron regions probe`. A function in each region, on its platform, measures the links from it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ephemeron.communication.channels.credentials import environment, public_address
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError
from ephemeron.functions.base import Call, Invocation, Platform
from ephemeron.functions.entries import PRELOAD_VARIABLE
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.regions.driver.network_options import check_network, network_of
from ephemeron.regions.link_probe import LinkProbeRequest, LinkProbeResult
from ephemeron.regions.region_files import Region, RegionLink, Regions, credentials_of, groups_of, parse_regions
from ephemeron.runs.folders import new_run_id
from ephemeron.training.driver.launching import admission
from ephemeron.training.job import Configuration, RegionOptions

LIFETIME_S = 300.0
MEMORY_MB = 512


async def probe_links(regions: Regions, *, nbytes: int) -> tuple[RegionLink, ...]:
    """All links between regions, each direction on its own.

    Args:
        regions: at least two.
        nbytes: size of large updates.

    Raises:
        JobError: a region is simulated, there is no common store, or a function fails.
    """
    c = _configuration(regions)
    run, key = new_run_id("geo-probe"), SigningKey.new()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ephemeron-")))
        store, secrets = public_address(regions.store)
        store = store or (folder.resolve() / "objects").as_uri()
        calls = []
        for index, (region, group) in enumerate(zip(regions.region, c.regions.region, strict=True)):
            variables = {**secrets, **credentials_of(region)}
            stack.enter_context(environment(variables))
            platform, memory_mb = await _opened(stack, region, store, f"{run}-{region.name}", folder, variables)
            request = LinkProbeRequest(store=store, names=regions.names, index=index, nbytes=nbytes, network=network_of(c, group))
            call = Call(
                run=run,
                rank=index,
                attempt=0,
                memory_mb=memory_mb,
                lifetime_s=LIFETIME_S,
                channel=store,
                entry="regions-link-probe",
                origin=time.time(),
                key=key.text,
                request=plain(request),
            )
            calls.append(await platform.invoke(call))
        results = await asyncio.gather(*(_result(call, region) for call, region in zip(calls, regions.region, strict=True)))
    return tuple(
        RegionLink(
            source=region.name,
            target=found.target,
            bandwidth_mbit_s=float(f"{found.bandwidth * 8 / 1e6:.4g}"),
            latency_s=float(f"{found.latency_s:.3g}"),
            usd_per_gb=_price(regions, region.name, found.target),
            one_way=True,
        )
        for region, result in zip(regions.region, results, strict=True)
        for found in result.links
    )


def _configuration(regions: Regions) -> Configuration:
    for region in regions.region:
        if region.platform == "simulated":
            raise JobError(f"region {region.name} is simulated: it has no links to measure", remedy="name a platform")
    if not regions.store and any(region.platform != "local" for region in regions.region):
        raise JobError("regions on several platforms need a store that all of them reach", remedy="give store")
    c = Configuration(
        regions=RegionOptions(
            region=groups_of(regions),
            store=regions.store,
            communicator=regions.communicator,
            relay=regions.relay,
            authority=regions.authority,
        )
    )
    check_network(c)
    return c


async def _opened(
    stack: contextlib.AsyncExitStack, region: Region, store: str, run: str, folder: Path, variables: dict[str, str]
) -> tuple[Platform, int]:
    """The platform of a region, and the memory of its functions."""
    run_dir = folder / run
    run_dir.mkdir()
    if region.platform not in CLOUDS:
        from ephemeron.functions.local import LocalPlatform

        local = await LocalPlatform.start(run_dir, env={**variables, PRELOAD_VARIABLE: ""})
        stack.push_async_callback(local.shutdown)
        return local, MEMORY_MB
    where = cloud(region.platform)
    settings = where.settings().located()
    wanted = {"platform": region.platform, "workers": 1, "channel": store, "memory_mb": region.memory_mb}
    c = dataclasses.replace(build(Configuration, wanted, where=f"region {region.name}"), aggregators=1)
    c, _ = admission.admit(where, c, settings, variables)
    handle = admission.make_handle(c, run=run, run_dir=run_dir, channel=store, since=time.time(), starting=True)
    opened = await where.open(handle, settings)
    stack.push_async_callback(opened.shutdown)
    return opened, c.memory_mb


async def _result(invocation: Invocation, region: Region) -> LinkProbeResult:
    outcome = await invocation.wait()
    if outcome.status != "ok":
        lines = outcome.error.strip().splitlines() or ["without a word"]
        raise JobError(f"the function of region {region.name} ended badly: {outcome.status}: {lines[0][:300]}")
    return build(LinkProbeResult, outcome.value, where=f"result of region {region.name}")


def _price(regions: Regions, source: str, target: str) -> float | None:
    known = regions.link_of(source, target)
    return None if known is None else known.usd_per_gb


def links_as_toml(links: Sequence[RegionLink]) -> str:
    """`[[link]]` tables."""
    parts = []
    for link in links:
        price = "" if link.usd_per_gb is None else f"usd_per_gb = {link.usd_per_gb}\n"
        parts.append(
            f'[[link]]\nsource = "{link.source}"\ntarget = "{link.target}"\nbandwidth_mbit_s = {link.bandwidth_mbit_s}\n'
            f"latency_s = {link.latency_s}\n{price}one_way = {str(link.one_way).lower()}\n"
        )
    return "\n".join(parts)


def with_links(text: str, links: Sequence[RegionLink]) -> str:
    """A file of regions with other links; all else, comments too, stays.

    Raises:
        JobError: the result would be no file of regions.
    """
    kept = re.sub(r"(?m)^\[\[link\]\].*(?:\n(?!\[).*)*\n?", "", text).rstrip()
    found = f"{kept}\n\n{links_as_toml(links)}"
    parse_regions(found)
    return found
