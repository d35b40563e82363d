"""Workloads, platforms and spaces, drawn at random or by hand."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from ephemeron.training.planner.model.direct_links import DirectLinks
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, QuotaRange, Workload
from ephemeron.training.planner.model.rates import Affine, Power, Saturating, Transfer

PRICES = {"price_gb_s": 1.66667e-5, "price_invocation": 2e-7, "price_put": 5e-6, "price_get": 4e-7}


def workload(**values: float) -> Workload:
    """ResNet-50 on CIFAR-10, FasDL table 5.1; the memory line is assumed."""
    known = {
        "model_mb": 97.49,
        "a": 37.19,
        "b": 12.48,
        "m": -111.46,
        "memory_slope_mb": 6,
        "memory_base_mb": 700,
        "dataset_mb": 180,
        "samples": 50_000,
    }
    return Workload(**{**known, **values})


def platform(**values: object) -> PlatformProfile:
    """Roughly AWS Lambda with S3."""
    rows = [(128, 10, 0.3, 60, 0.3), (512, 40, 0.2, 75, 0.4), (1024, 60, 0.15, 80, 0.35), (1792, 73, 0.11, 82, 0.35)]
    transfer = tuple(
        Transfer(memory_mb=m, up=Saturating(p_mb_s=a, t_per_mb=b), down=Saturating(p_mb_s=c, t_per_mb=d)) for m, a, b, c, d in rows
    )
    known = {"name": "lambda", "poll_s": 0.03, "transfer": transfer, **PRICES}
    return PlatformProfile(**{**known, **values})


TERMS = [
    ExecutionOptions(pattern="k-reduce", sync="bsp"),
    ExecutionOptions(pattern="k-reduce", sync="hap"),
    ExecutionOptions(pattern="pipelined"),
    ExecutionOptions(pattern="standalone"),
]


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


rates = st.one_of(
    st.builds(Saturating, p_mb_s=numbers(1, 200), t_per_mb=numbers(0.05, 5)),
    st.builds(Affine, latency_s=numbers(0, 0.3), mb_s=numbers(1, 200)),
    st.builds(Power, latency_s=numbers(0, 0.1), s_per_mb=numbers(0.005, 0.5), exponent=numbers(0.4, 1.2)),
)


direct_links = st.builds(
    DirectLinks,
    latency_s=numbers(0, 0.05),
    mb_s=numbers(1, 500),
    cpu_s_per_mb=st.sampled_from([0.0, 0.004]),
    setup_s=st.sampled_from([0.0, 0.5]),
    setup_each_s=st.sampled_from([0.0, 0.3]),
    failure=st.sampled_from([0.0, 0.1, 1.0]),
    one_phase_mb=st.sampled_from([0.0, 50.0]),
    price_mb=st.sampled_from([0.0, 2e-5]),
    price_service_hour=st.sampled_from([0.0, 0.05]),
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Also platforms on which more memory makes transfers slower, as measurements sometimes say."""
    nodes = draw(st.lists(st.integers(128, 3000), min_size=1, max_size=4, unique=True))
    transfer = tuple(Transfer(memory_mb=m, up=draw(rates), down=draw(rates)) for m in sorted(nodes))
    where = platform(
        transfer=transfer,
        poll_s=draw(st.sampled_from([0.0, 0.03])),
        parallel=draw(st.sampled_from([1, 8])),
        lifetime_s=draw(st.sampled_from([20.0, 900.0])),
        memory_mb=QuotaRange(min=128, max=2048, step=128),
        price_mb=draw(st.sampled_from([0.0, 1e-5])),
        cold_start_s=draw(numbers(0, 5)),
        start_each_s=draw(st.sampled_from([0.0, 1.3])),
        price_list=draw(st.sampled_from([0.0, 5e-6])),
        price_gb_hour=draw(st.sampled_from([0.0, 0.084])),
        links=draw(st.none() | direct_links),
    )
    what = workload(
        model_mb=draw(numbers(0.1, 300)),
        a=draw(numbers(0.5, 2000)),
        b=draw(numbers(0, 30)),
        m=draw(numbers(-100, 500)),
        memory_slope_mb=draw(numbers(0, 30)),
        memory_base_mb=draw(numbers(0, 1000)),
        samples=draw(st.integers(10, 5000)),
        dataset_mb=draw(numbers(0, 200)),
        test_samples=draw(st.sampled_from([0, 500])),
        vcpus=draw(st.sampled_from([0.0, 0.5, 1.0])),
        fold_s_per_mb=draw(st.sampled_from([0.0, 0.01])),
        step_s=draw(st.sampled_from([0.0, 0.005])),
        apply_s=draw(st.sampled_from([0.0, 0.01])),
        lockstep_cpu_s=draw(st.sampled_from([0.0, 0.003])),
        direct_lockstep_cpu_s=draw(st.sampled_from([None, 0.0, 0.001])),
        first_cpu_s=draw(st.sampled_from([0.0, 0.2])),
    )
    return Profile(workload=what, platform=where)


@st.composite
def short_lives(draw: st.DrawFn) -> Profile:
    """Functions that mostly have to hand over, or live too briefly for an iteration."""
    profile = draw(profiles())
    what = dataclasses.replace(
        profile.workload,
        a=draw(numbers(1, 100)),
        b=draw(numbers(0, 5)),
        m=0.0,
        model_mb=draw(numbers(0.1, 20)),
        memory_base_mb=draw(numbers(0, 300)),
        memory_slope_mb=draw(numbers(0, 5)),
        samples=draw(st.integers(50, 1500)),
        dataset_mb=draw(numbers(0, 20)),
    )
    return dataclasses.replace(profile, workload=what, platform=dataclasses.replace(profile.platform, lifetime_s=draw(numbers(3, 40))))
