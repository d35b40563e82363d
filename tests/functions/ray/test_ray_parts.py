"""What of the Ray platform can be held without a cluster."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.errors import JobError, MissingExtra
from ephemeron.functions.ray.cluster import ClusterNode, cpus_of, ray_module, room
from ephemeron.functions.ray.preflight import check_channel, check_node
from ephemeron.functions.ray.settings import RaySettings
from ephemeron.functions.source_bundle import digest

NODE = ClusterNode(id="0123456789abcdef", host="a", cpus=2.0, memory_mb=4096.0)
NODES = st.lists(
    st.builds(
        ClusterNode, id=st.just("n"), host=st.just("h"), cpus=st.integers(0, 64).map(float), memory_mb=st.integers(0, 100_000).map(float)
    ),
    max_size=6,
)
QUOTA = st.integers(128, 20_000)


@given(nodes=NODES, memory_mb=QUOTA, cpus=st.floats(0.0001, 64).map(lambda c: round(c, 4)))
def test_what_has_room_is_what_can_be_dealt_out_one_by_one(nodes: list[ClusterNode], memory_mb: int, cpus: float) -> None:
    dealt = 0
    for node in nodes:
        memory, grains = node.memory_mb, round(node.cpus * 10_000)
        while memory >= memory_mb and grains >= round(cpus * 10_000):
            memory, grains, dealt = memory - memory_mb, grains - round(cpus * 10_000), dealt + 1
    assert room(nodes, memory_mb=memory_mb, cpus=cpus) == dealt


@pytest.mark.parametrize(("gpus", "fits"), [(0.0, 8), (0.25, 8), (0.5, 6), (0.75, 3), (1.0, 3), (2.0, 1), (4.0, 0)])
def test_a_function_has_its_gpus_on_one_node_and_a_part_of_one_on_one_gpu(gpus: float, fits: int) -> None:
    nodes = [dataclasses.replace(NODE, cpus=4.0, gpus=g) for g in (1.0, 2.0)]
    assert room(nodes, memory_mb=1024, cpus=1.0, gpus=gpus) == fits


@pytest.mark.parametrize("gpus", [-1.0, 1.5, float("nan"), float("inf")])
def test_gpus_are_whole_or_a_part_of_one(gpus: float) -> None:
    with pytest.raises(JobError, match=r"use e\.g\. 1 or 0\.5"):
        RaySettings(address="head:6379", gpus=gpus).located()


@given(memory_mb=QUOTA, mb_per_vcpu=st.floats(100, 20_000))
def test_reserved_is_the_share_at_least_and_what_ray_can_count(memory_mb: int, mb_per_vcpu: float) -> None:
    cpus, share = cpus_of(memory_mb, mb_per_vcpu), memory_mb / mb_per_vcpu
    assert share - 1e-9 <= cpus <= share + (1.0 if share > 1 else 1.1e-4)
    assert cpus * 10_000 == pytest.approx(round(cpus * 10_000))
    assert cpus == int(cpus) or cpus < 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ModuleNotFoundError("No module named 'ephemeron'"), "cannot run our code.*install ephemeron there"),
        ({"code": "other", "found": "mark", "error": ""}, "has code other"),
        ({"code": digest(), "found": "", "error": "no boto"}, "cannot use channel.*no boto"),
        ({"code": digest(), "found": "", "error": ""}, "does not see in channel 's3://b/p'"),
    ],
)
def test_a_node_that_cannot_take_functions_is_named(answer: object, said: str) -> None:
    with pytest.raises(JobError, match=rf"node a \(01234567\).*{said}"):
        check_node(NODE, answer, "mark", "s3://b/p")
    check_node(NODE, {"code": digest(), "found": "mark", "error": ""}, "mark", "s3://b/p")


def test_channels_that_nodes_could_not_be_told_of() -> None:
    check_channel("redis://cache:6379", {})
    with pytest.raises(JobError, match="'parameter_server' has no address"):
        check_channel("parameter_server", {})
    with pytest.raises(JobError, match="EPHEMERON_CHANNEL_PASSWORD"):
        check_channel("redis://cache:6379", {"EPHEMERON_CHANNEL_PASSWORD": "x"})


def test_which_cluster_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RaySettings().located().address == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert RaySettings().located().address == "head:6379"
    assert RaySettings(address="ray://x:10001").located().address == "ray://x:10001"
    with pytest.raises(JobError, match="ray start --head"):
        RaySettings(address="local").located()
    with pytest.raises(JobError, match="mb_per_vcpu 0"):
        RaySettings(mb_per_vcpu=0).located()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'ephemeron\[ray\]'"):
        ray_module()
