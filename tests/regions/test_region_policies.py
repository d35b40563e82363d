"""Policies of regions as state machines: what all regions agree on, what nothing loses, and when rounds are due."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.errors import JobError
from ephemeron.regions.compression import Feedback, codec_of
from ephemeron.regions.policies import Contribution, Due, ExchangeSchedule, RegionPolicy, RegionSync, checked_sync, parse_sync
from ephemeron.regions.policies.base import DiLoCo

ELEMENTS = 12
WHOLE = slice(0, ELEMENTS)


@st.composite
def schedules(draw: st.DrawFn) -> ExchangeSchedule:
    every = draw(st.integers(1, 12))
    iterations = draw(st.integers(1, 60))
    return ExchangeSchedule(
        iterations=iterations,
        every=every,
        rounds=draw(st.integers(0, (iterations - 1) // every)),
        fragments=draw(st.integers(1, 6)),
        delay=draw(st.integers(0, every - 1)),
    )


@given(schedules())
def test_each_round_of_each_fragment_is_sent_once_and_applied_once_in_order(schedule: ExchangeSchedule) -> None:
    sent: list[Due] = []
    applied: list[Due] = []
    for iteration in range(1, schedule.iterations + 1):
        applies = schedule.applies(iteration)
        assert schedule.is_due(iteration) or not (applies or schedule.sends(iteration))
        # Rounds that were sent before come first; the last one is sent and applied at the end.
        for due in [d for d in applies if schedule.sent_before(d) < iteration]:
            assert due in sent
            applied.append(due)
        sent += schedule.sends(iteration)
        for due in [d for d in applies if schedule.sent_before(d) == iteration]:
            assert due in sent
            applied.append(due)
    wanted = [Due(f, n) for f in range(schedule.fragments) for n in range(1, schedule.last + 1)]
    assert sorted(sent) == sorted(applied) == wanted
    for fragment in range(schedule.fragments):
        own = [due.round for due in applied if due.fragment == fragment]
        assert own == sorted(own)
    for due in wanted:
        late = schedule.applied_before(due) - schedule.sent_before(due)
        assert late == min(schedule.delay, schedule.iterations - schedule.sent_before(due))


@given(st.integers(0, 100), st.integers(1, 9))
def test_fragments_are_contiguous_and_as_equal_as_can_be(elements: int, fragments: int) -> None:
    schedule = ExchangeSchedule(iterations=2, every=1, rounds=0, fragments=fragments)
    parts = [schedule.part(f, elements) for f in range(fragments)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(elements))
    assert max(p.stop - p.start for p in parts) - min(p.stop - p.start for p in parts) <= 1


def test_fragments_are_sent_at_different_iterations() -> None:
    schedule = ExchangeSchedule(iterations=200, every=20, rounds=9, fragments=4)
    counts = [len(schedule.sends(t)) for t in range(1, 200)]
    assert max(counts) == 1
    assert [t for t, n in enumerate(counts[20:60], start=21) if n] == [25, 30, 35, 40, 45, 50, 55, 60]


def vectors(seed: int, count: int, scale: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(scale * rng.normal(size=ELEMENTS)).astype(np.float32) for _ in range(count)]


@given(st.integers(0, 10_000), st.sampled_from(["sma", "diloco", "diloco:lr=1,momentum=0"]), st.integers(2, 5), st.integers(1, 6))
def test_regions_have_the_same_parameters_after_each_round(seed: int, name: str, regions: int, rounds: int) -> None:
    (start,) = vectors(seed, 1)
    policies = [parse_sync(name).new() for _ in range(regions)]
    for policy in policies:
        policy.begin(start)
    own = [start.copy() for _ in policies]
    for number in range(rounds):
        own = [mine - step for mine, step in zip(own, vectors(seed + number + 1, regions, 0.1), strict=True)]
        sent = [Contribution(p.contribution(WHOLE, mine), 3 + i) for i, (p, mine) in enumerate(zip(policies, own, strict=True))]
        for policy, mine in zip(policies, own, strict=True):
            policy.sent(WHOLE, mine)
        own = [p.merge(WHOLE, mine, sent, last=False) for p, mine in zip(policies, own, strict=True)]
        for mine in own[1:]:
            np.testing.assert_array_equal(mine, own[0])


def test_diloco_is_nesterov_momentum_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    start, *steps = vectors(3, 6, 0.1)
    policy = DiLoCo(lr=0.7, momentum=0.9)
    policy.begin(start)
    parameter = torch.nn.Parameter(torch.from_numpy(start.astype(np.float64)))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    own = start
    for step in steps:
        change = policy.contribution(WHOLE, own - step)
        own = policy.merge(WHOLE, own - step, [Contribution(change, 1)], last=False)
        parameter.grad = torch.from_numpy(change.astype(np.float64))
        optimizer.step()
        np.testing.assert_allclose(own, parameter.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize(("name", "converges"), [("diloco", True), ("diloco:lr=0.7,momentum=0.9", False)])
def test_the_default_outer_momentum_does_not_add_up_with_that_of_the_regions(name: str, converges: bool) -> None:
    """Four steps of SGD with momentum 0.9 between exchanges, on a quadratic whose minimum differs by region."""
    start, curvature = np.ones(ELEMENTS, dtype=np.float32), np.linspace(0.05, 2, ELEMENTS)
    policies = [parse_sync(name).new() for _ in range(2)]
    own, velocity = [start.copy() for _ in policies], [np.zeros(ELEMENTS) for _ in policies]
    for policy in policies:
        policy.begin(start)
    for _ in range(60):
        for i, minimum in enumerate((0.1, -0.1)):
            for _ in range(4):
                velocity[i] = 0.9 * velocity[i] + curvature * (own[i] - minimum)
                own[i] = (own[i] - 0.05 * velocity[i]).astype(np.float32)
        sent = [Contribution(p.contribution(WHOLE, mine), 1) for p, mine in zip(policies, own, strict=True)]
        own = [p.merge(WHOLE, mine, sent, last=False) for p, mine in zip(policies, own, strict=True)]
    assert (np.abs(own[0]).max() < 0.01) == converges


def test_mean_of_changes_with_outer_rate_one_is_the_mean_of_parameters() -> None:
    start, a, b = vectors(4, 3)
    policy = DiLoCo(lr=1.0, momentum=0.0)
    policy.begin(start)
    changes = [Contribution(start - a, 2), Contribution(start - b, 1)]
    np.testing.assert_allclose(policy.merge(WHOLE, a, changes, last=False), (2 * a + b) / 3, atol=1e-6)


@given(st.integers(0, 10_000), st.data())
def test_asynchronous_regions_lose_no_step_in_whatever_order_these_arrive(seed: int, data: st.DataObject) -> None:
    (start,) = vectors(seed, 1)
    start = np.round(start * 8)  # whole numbers: sums do not depend on their order
    policies = [parse_sync("asgd-ga").new() for _ in range(3)]
    own = [start.copy() for _ in policies]
    for policy in policies:
        policy.begin(start)
    total = np.zeros(ELEMENTS, dtype=np.float32)
    waiting: list[tuple[int, np.ndarray]] = []
    for turn in range(data.draw(st.integers(1, 12))):
        i = data.draw(st.integers(0, 2))
        step = np.round(vectors(seed + turn, 1)[0] * 4)
        own[i] = own[i] - step
        total += step
        change = policies[i].contribution(WHOLE, own[i])
        policies[i].sent(WHOLE, own[i])
        waiting += [(j, change) for j in range(3) if j != i]
        for _ in range(data.draw(st.integers(0, len(waiting)))):
            j, arrived = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            own[j] = policies[j].merge(WHOLE, own[j], [Contribution(arrived, 1)], last=False)
    for j, arrived in waiting:
        own[j] = policies[j].merge(WHOLE, own[j], [Contribution(arrived, 1)], last=False)
    for mine in own:
        np.testing.assert_array_equal(mine, start - total)


def test_an_average_of_whatever_has_arrived_weighs_the_regions_alike() -> None:
    policy = RegionSync(policy="ama").new()
    own, a, b = vectors(5, 3)
    policy.begin(own)
    np.testing.assert_allclose(policy.merge(WHOLE, own, [Contribution(a, 5), Contribution(b, 1)], last=False), (own + a + b) / 3, atol=1e-6)
    np.testing.assert_array_equal(policy.merge(WHOLE, own, [], last=False), own)


@pytest.mark.parametrize(
    ("every", "delay", "mixing", "counted"),
    [
        (12, 8, None, 0.5),
        (24, 23, None, 0.5),
        (12, 8, 0.5, (4 + 0.5 * 8) / 12),
        (32, 8, None, 0.75),  # more than half are done before a round is sent: nothing is kept of the others
        (8, 0, None, 1.0),
    ],
)
def test_half_of_the_steps_between_two_rounds_count_with_a_delay(every: int, delay: int, mixing: float | None, counted: float) -> None:
    schedule = ExchangeSchedule(iterations=41 * every, every=every, rounds=40, delay=delay)
    policies = [DiLoCo(lr=1, momentum=0, mixing=mixing) for _ in range(2)]
    own, sent = [np.zeros(1) for _ in policies], []
    for policy, mine in zip(policies, own, strict=True):
        policy.begin(mine)
    moved = []
    for iteration in range(1, schedule.iterations):
        own = [mine - 1.0 for mine in own]  # every step is one
        if schedule.sends(iteration):
            sent = [Contribution(p.contribution(WHOLE, mine), 1) for p, mine in zip(policies, own, strict=True)]
        for due in schedule.applies(iteration):
            late = schedule.late(due)
            own = [p.merge(WHOLE, mine, sent, last=False, late=late) for p, mine in zip(policies, own, strict=True)]
            np.testing.assert_array_equal(own[0], own[1])
            moved.append(policies[0].state()["common"][0])
    np.testing.assert_allclose(np.diff(moved)[1:], -counted * every)


@pytest.mark.parametrize("name", ["asgd-ga", "ama", "sma", "diloco", "diloco:delay=1"])
def test_a_restored_policy_goes_on_as_the_one_before(name: str) -> None:
    start, own, a, b = vectors(6, 4)

    def advance(policy: RegionPolicy) -> np.ndarray:
        change = policy.contribution(WHOLE, own)
        policy.sent(WHOLE, own)
        return policy.merge(WHOLE, own, [Contribution(change, 2), Contribution(a, 1)], last=False)

    policy, later = parse_sync(name).new(), parse_sync(name).new()
    policy.begin(start)
    policy.merge(WHOLE, own, [Contribution(b, 1)], last=False)
    later.begin(own)
    later.load(policy.state())
    np.testing.assert_array_equal(advance(policy), advance(later))


CODECS = ["none", "int8", "int4", "topk:0.2", "topk:1", "topk2:0.2"]


@given(st.integers(0, 10_000), st.integers(1, 3000), st.sampled_from(CODECS), st.sampled_from(["float32", "float64"]))
def test_payloads_are_as_large_as_stated_and_the_rest_is_owed(seed: int, elements: int, name: str, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    vector = (rng.normal(size=elements) * 10.0 ** rng.integers(-6, 6)).astype(dtype)
    codec = codec_of(name)
    feedback = Feedback(codec, elements, vector.dtype)
    feedback.residual[:] = rng.normal(size=feedback.residual.size).astype(dtype)
    owed = feedback.residual.copy()
    data = feedback.encode(vector, slice(0, elements))
    decoded = codec.decode(data, elements, vector.dtype)
    if name == "none":
        np.testing.assert_array_equal(decoded, vector)
        return
    np.testing.assert_array_equal(feedback.residual, vector + owed - decoded)
    kept = int(np.ceil(float(name.partition(":")[2] or 0) * elements))
    most = {
        "int8": elements + 4 * -(-elements // 1024),
        "int4": -(-elements // 2) + 4 * -(-elements // 256),
        "topk": 8 + 5 * kept + elements // 255,
        "topk2": 16 + -(-kept // 4) + kept + elements // 255,
    }[name.partition(":")[0]]
    assert len(data) <= most


@given(st.integers(0, 10_000), st.integers(1, 700), st.floats(0.001, 1))
def test_top_k_keeps_the_largest_values_as_they_are(seed: int, elements: int, share: float) -> None:
    vector = np.random.default_rng(seed).normal(size=elements).astype(np.float32)
    codec = codec_of(f"topk:{share}")
    decoded = codec.decode(codec.encode(vector), elements, vector.dtype)
    kept = decoded != 0
    assert kept.sum() == int(np.ceil(share * elements))
    np.testing.assert_array_equal(decoded[kept], vector[kept])
    assert np.abs(vector[kept]).min() >= np.abs(vector[~kept]).max(initial=0)


@pytest.mark.parametrize("name", CODECS[1:])
def test_what_is_owed_is_paid(name: str) -> None:
    """The sum of what is received follows the sum of what was to be sent."""
    rng = np.random.default_rng(1)
    feedback, constant = Feedback(codec_of(name), 500, np.dtype(np.float64)), rng.normal(size=500)
    received = np.zeros(500)
    for _ in range(200):
        received += codec_of(name).decode(feedback.encode(constant, slice(0, 500)), 500, np.dtype(np.float64))
    assert np.abs(received / 200 - constant).max() < 0.1 * np.abs(constant).max()


@pytest.mark.parametrize(
    ("text", "compression", "said"),
    [
        ("gossip", "none", "is no policy"),
        ("diloco:staleness=1", "none", "is no option of diloco"),
        ("diloco:lr=x", "none", "is no number"),
        ("diloco:mixing=1", "none", "keeps the common parameters out"),
        ("ama", "int8", "sends parameters, not changes"),
        ("diloco:delay=9", "none", "is not below 9"),
        ("diloco", "zip", "is not known"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, compression: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        checked_sync(text, compression, 9)
