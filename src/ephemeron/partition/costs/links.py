"""Latency and bandwidth of every ordered pair of devices, measured between processes (NetSplit, section 4.2).

Pairs are measured one after the other, so that none slows down another. Pairs that share a bus get less when all of them send, which
is not measured here. The processes are on this machine and connected over loopback; throttles make their links unequal in a known
way. Peers on other machines are measured by the same calls.

Latency and bandwidth of a link from timed messages. Pure.

NetSplit (section 4.2, figure 4-3) fits a line by least squares. Over five orders of magnitude of size that would fit the largest
messages only. Here the squares of relative errors are minimised, so that the latency is as accurate as the bandwidth. The fastest
message of each size counts, because other load on the machine can only add time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ephemeron.communication.rpc import Client
from ephemeron.config import own_processes
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError
from ephemeron.partition.costs.peer import Throttle, TimingReply, TimingRequest
from ephemeron.partition.graph.topology import Device, Link, Topology

SIZES = (0, 4096, 65536, 1 << 20, 8 << 20)
Pair = tuple[str, str]
_TRIALS = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTopology:
    """Devices with measured links, and the fit of each link."""

    topology: Topology
    fits: Mapping[Pair, LinkFit]


async def measure_links(
    peers: Mapping[str, tuple[str, int]],
    *,
    token: str,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    throttles: Mapping[Pair, Throttle] | None = None,
    timeout_s: float = 120.0,
) -> dict[Pair, LinkFit]:
    """Latency and bandwidth of every ordered pair of peers, measured one pair after the other.

    Args:
        peers: host and port by device.
        token: shared by all.
        sizes: bytes of messages.
        repeats: messages of each size.
        throttles: by (source, target).
        timeout_s: for each pair.

    Raises:
        JobError: a throttle for an unknown pair, or times that no line fits; names the pair.
        ConnectionError: a peer does not answer.
        TimeoutError: a pair took longer than its limit.
    """
    pairs = [(a, b) for a in peers for b in peers if a != b]
    for pair in throttles or {}:
        if pair not in pairs:
            raise JobError(f"throttle for {pair[0]} → {pair[1]}, which is no pair of devices", remedy="name two of them")
    made = {}
    for a, b in pairs:
        throttle = (throttles or {}).get((a, b), Throttle())
        client = await Client.connect_tcp(*peers[a], token=token)
        try:
            host, port = peers[b]
            request = TimingRequest(host=host, port=port, sizes=tuple(sizes), repeats=repeats, throttle=throttle)
            async with asyncio.timeout(timeout_s):
                made[a, b] = await _one_link(client, request, f"{a} → {b}")
            _log.debug("measured link %s → %s: %s", a, b, made[a, b])
        finally:
            await client.close()
    return made


async def _one_link(client: Client, request: TimingRequest, where: str) -> LinkFit:
    """Latency and bandwidth of one link; measured up to `_TRIALS` times if the machine was too busy for a line to fit."""
    samples: dict[int, list[float]] = {}
    for trial in range(1, _TRIALS + 1):
        reply, _ = await client.call("send", plain(request))
        for nbytes, times in zip(request.sizes, build(TimingReply, reply, where=where).samples, strict=True):
            samples.setdefault(nbytes, []).extend(times)
        try:
            return _fitted(samples, request.throttle, where)
        except JobError as e:
            if trial == _TRIALS:
                raise
            _log.info("measuring again: %s", e)
    raise AssertionError("the last trial returns or raises")


async def measure_here(
    devices: Iterable[Device],
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    throttles: Mapping[Pair, Throttle] | None = None,
    name: str = "measured",
) -> MeasuredTopology:
    """Links between devices, measured between processes of this machine.

    Raises:
        JobError: as with `measure_links`.
    """
    devices = tuple(devices)
    token = secrets.token_hex(16)
    async with _started([d.name for d in devices], token) as peers:
        fits = await measure_links(peers, token=token, sizes=sizes, repeats=repeats, throttles=throttles)
    links = tuple(Link(source=a, target=b, latency_s=f.latency_s, bandwidth_bytes_s=f.bandwidth_bytes_s) for (a, b), f in fits.items())
    return MeasuredTopology(topology=Topology(name=name, devices=devices, links=links), fits=fits)


def _fitted(samples: Mapping[int, Sequence[float]], limit: Throttle, where: str) -> LinkFit:
    """Fit with the throttle subtracted and added again: a throttle delays one direction only, and `fit_link` halves latencies."""
    try:
        plain = {n: [t - limit.latency_s for t in times] for n, times in samples.items()}
        f = fit_link(plain)
    except JobError as e:
        raise JobError(f"link {where}: {e.problem}", remedy=e.remedy) from None
    return LinkFit(latency_s=f.latency_s + limit.latency_s, bandwidth_bytes_s=f.bandwidth_bytes_s, worst_error=f.worst_error)


@asynccontextmanager
async def _started(names: Sequence[str], token: str) -> AsyncIterator[dict[str, tuple[str, int]]]:
    processes = []
    try:
        peers = {}
        for name in names:
            process = await asyncio.create_subprocess_exec(
                *own_processes.command("link-peer"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            processes.append(process)
            assert process.stdout is not None
            assert process.stdin is not None
            process.stdin.write(f"{token}\n".encode())
            async with asyncio.timeout(60):
                line = (await process.stdout.readline()).decode().split()
            if len(line) != 2:
                raise ConnectionError(f"the process of device {name} ended instead of listening")
            peers[name] = (line[0], int(line[1]))
        yield peers
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


# -- latency and bandwidth of a link from timed messages. Pure ----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Line through timed messages: seconds = latency_s + nbytes / bandwidth_bytes_s."""

    latency_s: float
    bandwidth_bytes_s: float
    worst_error: float
    """Largest relative difference of a size's fastest message from the line."""


def fit_link(samples: Mapping[int, Sequence[float]], *, replies: bool = True) -> LinkFit:
    """Line through the fastest message of each size.

    Args:
        samples: seconds by bytes sent; at least two sizes.
        replies: whether times include an empty reply; half of the time of an empty message is then the way back.

    Raises:
        JobError: too few sizes, a time that is not positive, or times that do not grow with the size.
    """
    if len(samples) < 2:
        raise JobError(f"a link needs messages of two sizes, not of {sorted(samples)}", remedy="send larger ones too")
    points = {n: min(times) for n, times in samples.items() if times}
    for n, seconds in points.items():
        if not seconds > 0:
            raise JobError(f"a message of {n} bytes took {seconds} s", remedy="measure again")
    intercept, slope = _line(points)
    if intercept < 0:
        intercept, slope = 0.0, _through_origin(points)
    if not slope > 0:
        raise JobError(f"messages of {max(points)} bytes are not slower than those of {min(points)}", remedy="send larger ones")
    worst = max(abs(intercept + slope * n - t) / t for n, t in points.items())
    return LinkFit(latency_s=intercept / 2 if replies else intercept, bandwidth_bytes_s=1 / slope, worst_error=worst)


def _line(points: Mapping[int, float]) -> tuple[float, float]:
    """Intercept and slope by relative least squares: normal equations with weights 1/t²."""
    w = [1 / t**2 for t in points.values()]
    sw = sum(w)
    mx = sum(a * n for a, n in zip(w, points, strict=True)) / sw
    my = sum(a * t for a, t in zip(w, points.values(), strict=True)) / sw
    sxx = sum(a * (n - mx) ** 2 for a, n in zip(w, points, strict=True))
    sxy = sum(a * (n - mx) * (t - my) for a, (n, t) in zip(w, points.items(), strict=True))
    slope = sxy / sxx
    return my - slope * mx, slope


def _through_origin(points: Mapping[int, float]) -> float:
    return sum(n / t for n, t in points.items()) / sum((n / t) ** 2 for n, t in points.items())
