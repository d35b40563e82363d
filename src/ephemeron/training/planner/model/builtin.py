"""Platform profiles that come with the library, so that a cloud can be planned for before it is paid for.

- `aws-lambda-s3`: fitted coefficients of published transfer times (`platforms/aws-lambda-s3.json` says which, from when,
  and what in it is assumed rather than measured).
- `aws-lambda-cache`: **derived**. The same link, since the function's own network is what binds at the sizes that are
  exchanged; a latency of 1 ms and no polling, since streams wait; prices of ElastiCache Serverless.
- `aws-microvm-s3`, `aws-microvm-cache`: **derived**. MicroVMs in their five sizes, at their own prices, with the transfers of Lambda
  functions of the same memory, and a start of 2 s: assumptions, since nothing was published or measured.
- `aws-lambda-server`: **derived**. λDNN's parameter server on one m5.large; its link is shared by all functions.
- `aws-lambda-direct`, `aws-lambda-punched`: **derived**. Direct links beside S3, for functions in one subnet of a VPC, and for functions
  without a VPC that punch holes; `aws-microvm-direct`: through the endpoints of MicroVMs. All coefficients of links are assumptions.

Prices are those of `ephemeron.prices`, whose file carries their date and sources.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

from ephemeron.errors import JobError
from ephemeron.prices import LinkPrices, Prices, load_link_prices, load_prices
from ephemeron.training.planner.model.direct_links import DirectLinks
from ephemeron.training.planner.model.profile import PlatformProfile, QuotaRange, parse_platform
from ephemeron.training.planner.model.rates import Rate, Saturating, Transfer
from ephemeron.units import MB

CACHE_LATENCY_S = 0.001
"""Assumed: within one availability zone."""
SERVER_MB_S = 94.0
"""Baseline of an m5.large, 0.75 Gbit/s (Amazon EC2 instance types); bursts up to 10 Gbit/s are not counted on."""
MICROVM_START_S = 2.0
"""Assumed: reports say "near instant" for a start from a snapshot."""
MICROVM_SIZES_MB = (512, 1024, 2048, 4096, 8192)
LINK_MB_S = 75.0
"""Assumed: 0.6 Gbit/s of a function's network, about what the largest functions got from S3."""
LINK_CPU_S_PER_MB = 0.005
"""Assumed: so that smaller functions get what they got from S3."""
LINKS = {
    "aws-lambda-direct": DirectLinks(
        latency_s=0.001,
        mb_s=LINK_MB_S,
        cpu_s_per_mb=LINK_CPU_S_PER_MB,
        setup_s=0.3,
        setup_each_s=0.01,
        route="private",
        source="assumed, for functions in one subnet of a VPC",
    ),
    "aws-lambda-punched": DirectLinks(
        latency_s=0.002,
        mb_s=LINK_MB_S,
        cpu_s_per_mb=LINK_CPU_S_PER_MB,
        setup_s=1.0,
        setup_each_s=0.1,
        failure=0.02,
        route="punched",
        source="assumed, for functions without a VPC: no hole was punched on Lambda",
    ),
    "aws-microvm-direct": DirectLinks(
        latency_s=0.005,
        mb_s=50.0,
        cpu_s_per_mb=2 * LINK_CPU_S_PER_MB,
        setup_s=1.0,
        setup_each_s=0.05,
        route="public",
        source="assumed, through endpoints of MicroVMs",
    ),
}
MICROVM = ("aws-microvm-s3", "aws-microvm-cache", "aws-microvm-direct")
BUILTIN = ("aws-lambda-s3", "aws-lambda-cache", "aws-lambda-server", "aws-lambda-direct", "aws-lambda-punched")


def builtin_platform(name: str) -> PlatformProfile:
    """A profile by its name.

    Raises:
        JobError: no such profile; names those there are.
    """
    if name in LINKS:
        return _linked(name, builtin_platform(f"{name.rpartition('-')[0]}-s3"))
    if name in MICROVM:
        return _microvm(name, builtin_platform(name.replace("microvm", "lambda")))
    if name not in BUILTIN:
        raise JobError(f"platform profile {name!r} is not built in", remedy=f"use one of {', '.join((*BUILTIN, *MICROVM))}")
    text = files(__package__).joinpath("platforms", "aws-lambda-s3.json").read_text()
    objects = priced(parse_platform(json.loads(text), where="aws-lambda-s3"), load_prices("objects"))
    if name == "aws-lambda-s3":
        return objects
    link = replace(objects, name=name, poll_s=0.0, transfer=tuple(_with_latency(t, CACHE_LATENCY_S) for t in objects.transfer))
    derived = f"derived from aws-lambda-s3: the same link with an assumed latency of {CACHE_LATENCY_S * 1000:g} ms, no polling"
    if name == "aws-lambda-cache":
        return priced(replace(link, channel="cache", notes=(derived, *objects.notes)), load_prices("cache"))
    shared = f"one m5.large as parameter server, {SERVER_MB_S:g} MB/s in each direction shared by all functions (assumed)"
    server = replace(link, channel="server", server_mb_s=SERVER_MB_S, notes=(derived, shared, *objects.notes))
    return priced(server, load_prices("server"))


def _linked(name: str, store: PlatformProfile) -> PlatformProfile:
    """A platform over direct links, with an object store beside them."""
    links = LINKS[name]
    notes = (f"derived from {store.name}: latency, bandwidth, setup and failures of links are {links.source}", *store.notes)
    found = replace(store, name=name, links=links, notes=notes).over_links()
    assert found is not None
    return with_link_prices(found, load_link_prices())


def with_link_prices(platform: PlatformProfile, prices: LinkPrices) -> PlatformProfile:
    """A platform profile whose direct links have the prices of their route."""
    links = platform.links
    if links is None:
        return platform
    gb_usd = prices.private_gb_usd if links.route == "private" else prices.public_gb_usd
    hour_usd = prices.meeting_hour_usd if links.route == "punched" else 0.0
    return replace(platform, links=replace(links, price_mb=gb_usd / 1000, price_service_hour=hour_usd))


def _microvm(name: str, functions: PlatformProfile) -> PlatformProfile:
    sizes = QuotaRange(min=MICROVM_SIZES_MB[0], max=MICROVM_SIZES_MB[-1], step=512, sizes=MICROVM_SIZES_MB)
    platform = replace(
        functions,
        name=name,
        memory_mb=sizes,
        lifetime_s=28_740.0,
        cold_start_s=MICROVM_START_S,
        warm_start_s=MICROVM_START_S,
        mb_per_vcpu=2048.0,
        notes=(
            f"derived from {functions.name}: its transfers, and a start of {MICROVM_START_S:g} s, are assumed for MicroVMs of the same memory",
            "bursts above a baseline are neither planned nor needed",
            *functions.notes,
        ),
    )
    return priced(platform, load_prices(functions.service, platform="aws-microvm"))


def priced(platform: PlatformProfile, prices: Prices) -> PlatformProfile:
    """A platform profile with the prices of a file."""
    return replace(
        platform,
        price_gb_s=prices.gb_second_usd,
        price_invocation=prices.invocation_usd,
        price_put=prices.put_usd,
        price_get=prices.get_usd,
        price_list=prices.list_usd,
        price_delete=prices.delete_usd,
        price_mb=prices.byte_usd * MB,
        price_gb_hour=prices.gb_hour_usd,
        least_kept_gb=prices.least_gb,
        price_server_hour=prices.server_hour_usd,
        burst=prices.burst,
        burst_s=prices.burst_s,
        as_of=prices.as_of,
    )


def _with_latency(transfer: Transfer, latency_s: float) -> Transfer:
    def lower(rate: Rate) -> Rate:
        return rate if isinstance(rate, Saturating) else replace(rate, latency_s=latency_s)

    return replace(transfer, up=lower(transfer.up), down=lower(transfer.down))
