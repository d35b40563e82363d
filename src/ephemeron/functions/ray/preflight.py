"""Checks of a cluster before a run begins; each refusal is one line.

Every node is asked by a task of its own: does it have this package, in this release, and does it find in the channel
what the client has put there? So an address that looks right and means another folder there is found out before
anything is launched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from ephemeron import blocking
from ephemeron.communication.channels.address import open_channel
from ephemeron.errors import EphemeronError, JobError, PlanInfeasible
from ephemeron.functions.base import Limits
from ephemeron.functions.ray.cluster import ClusterNode, connect, cpus_of, disconnect, nodes, ray_module, room
from ephemeron.functions.ray.platform import LIMITS
from ephemeron.functions.ray.settings import RaySettings
from ephemeron.functions.source_bundle import digest

_PROBE_S = 60.0
_PROBE = "ephemeron.probe"


def inspect(settings: RaySettings, channel: str, *, probe: bool = True) -> list[ClusterNode]:
    """Asks the cluster, and every node of it. Takes seconds, starts no function.

    Args:
        settings: located.
        channel: address without credentials.
        probe: False: nodes are listed and not asked.

    Raises:
        JobError: no cluster, no node with CPUs, another release on a node, or a channel that a node does not reach.
        MissingExtra: no Ray, or what the channel needs is absent here.
    """
    connect(settings.address, "ephemeron")
    try:
        found = [node for node in nodes() if node.cpus > 0 and node.memory_mb > 0]
        if not found:
            raise JobError(f"the Ray cluster at {settings.address!r} has no node with CPUs", remedy="start one: ray start --address HEAD")
        if probe:
            _probe_nodes(found, settings, channel)
        return found
    finally:
        disconnect()


def limits_of(found: Sequence[ClusterNode], settings: RaySettings, *, memory_mb: int) -> Limits:
    """Limits of calls: a function has to fit on one node, and all of them on the cluster."""
    largest = int(max(min(node.memory_mb, node.cpus * settings.mb_per_vcpu) for node in found))
    fits = room(found, memory_mb=memory_mb, cpus=cpus_of(memory_mb, settings.mb_per_vcpu), gpus=settings.gpus)
    # A successor waits in Ray's queue where there is no room, so it must not be refused: twice, not once.
    return dataclasses.replace(
        LIMITS, memory_max_mb=max(LIMITS.memory_min_mb, largest), mb_per_vcpu=settings.mb_per_vcpu, concurrency=max(1, 2 * fits)
    )


def check_fit(found: Sequence[ClusterNode], settings: RaySettings, *, workers: int, memory_mb: int) -> None:
    """Whether all workers can run at once, which they have to, since they wait for each other.

    Raises:
        PlanInfeasible: binding is `memory` or `concurrency`.
    """
    cpus = cpus_of(memory_mb, settings.mb_per_vcpu)
    fits = room(found, memory_mb=memory_mb, cpus=cpus, gpus=settings.gpus)
    wanted = f"{cpus:g} CPUs" + (f" and {settings.gpus:g} GPUs" if settings.gpus else "")
    if fits == 0:
        largest = max(n.gpus for n in found)
        raise PlanInfeasible(
            f"no node of the Ray cluster has room for a function of {memory_mb} MB and {wanted}; "
            f"the largest has {max(n.memory_mb for n in found):.0f} MB and {max(n.cpus for n in found):g} CPUs"
            + (f", and {largest:g} GPUs are on one node at most" if settings.gpus else ""),
            binding="memory",
        )
    if workers > fits:
        raise PlanInfeasible(
            f"{workers} workers of {memory_mb} MB and {wanted} are wanted, the Ray cluster has room for {fits}; "
            f"use fewer workers or less memory, or add nodes",
            binding="concurrency",
        )


def check_channel(channel: str, secrets: dict[str, str]) -> None:
    """Checks that the channel has an address that is valid on all nodes.

    Raises:
        JobError: it has no address that means the same everywhere, or needs credentials that nodes do not have.
    """
    if "://" not in channel:
        raise JobError(
            f"channel {channel!r} has no address that all nodes could be told",
            remedy="use s3://bucket/prefix, redis://HOST:PORT, or file:///folder on a file system that all nodes share",
        )
    if secrets:
        raise JobError(
            "nodes do not get credentials from an address, because Ray keeps and shows what actors are made with",
            remedy="set EPHEMERON_CHANNEL_PASSWORD where `ray start` runs, on each node",
        )


def _probe_nodes(found: Sequence[ClusterNode], settings: RaySettings, channel: str) -> None:
    key, mark = f"{_PROBE}.{secrets.token_hex(8)}", secrets.token_hex(8)
    blocking.run(lambda _: _put(channel, key, mark.encode()))
    try:
        for node, answer in zip(found, _answers(found, channel, key, settings), strict=True):
            check_node(node, answer, mark, channel)
    finally:
        blocking.run(lambda _: _forget(channel, key))


def _answers(found: Sequence[ClusterNode], channel: str, key: str, settings: RaySettings) -> list[Any]:
    """Each node's answer, or the exception instead of it."""
    ray = ray_module()
    on = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    task = ray.remote(answer_of_node)
    asked = [
        task.options(num_cpus=0, max_retries=0, scheduling_strategy=on(node_id=node.id, soft=False)).remote(channel, key) for node in found
    ]
    out: list[Any] = []
    for ref in asked:
        try:
            out.append(ray.get(ref, timeout=_PROBE_S))
        except Exception as e:  # noqa: BLE001 - any error of Ray is the node's answer
            out.append(e)
    return out


def answer_of_node(channel: str, key: str) -> dict[str, str]:
    """Runs on a node: which release it has, and what it finds in the channel."""

    async def fetch() -> str:
        async with open_channel(channel) as opened:
            data = await opened.fetch(key)
        return "" if data is None else bytes(data).decode(errors="replace")

    try:
        return {"code": digest(), "found": asyncio.run(fetch()), "error": ""}
    except EphemeronError as e:
        return {"code": digest(), "found": "", "error": str(e)}


def check_node(node: ClusterNode, answer: Any, mark: str, channel: str) -> None:
    """Checks the answer of a node.

    Args:
        answer: of `answer_of_node`, or the exception that came instead.
        mark: object that the client has put into the channel.

    Raises:
        JobError: the node cannot run functions; names the node and the reason.
    """
    place = f"node {node.host} ({node.id[:8]})"
    if isinstance(answer, BaseException):
        raise JobError(
            f"{place} of the Ray cluster cannot run our code: {' '.join(str(answer).split())[-200:]}",
            remedy="install ephemeron there, with the extras that the job needs",
        )
    if answer["code"] != digest():
        raise JobError(
            f"{place} of the Ray cluster has code {answer['code']}, this is {digest()}",
            remedy="install the same release of ephemeron on all nodes",
        )
    if answer["error"]:
        raise JobError(
            f"{place} of the Ray cluster cannot use channel {channel!r}: {answer['error']}",
            remedy="use a channel that all nodes reach, and set its credentials where `ray start` runs",
        )
    if answer["found"] != mark:
        raise JobError(
            f"{place} of the Ray cluster does not see in channel {channel!r} what this machine has put there",
            remedy="use s3://bucket/prefix, redis://HOST:PORT, or a folder that all nodes share",
        )


async def _put(channel: str, key: str, data: bytes) -> None:
    async with open_channel(channel) as opened:
        await opened.put(key, [data])


async def _forget(channel: str, key: str) -> None:
    async with open_channel(channel) as opened:
        await opened.delete([key])
