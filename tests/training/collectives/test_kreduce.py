"""K-REDUCE: the right mean, the same bits whatever the form and the order, and exactly the promised requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from groups import HighWater, PolledChannel, Rounds, exchange, in_rank_order, random_vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.communication.channels.base import Channel, Wrapper
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.communication.keys import Keys
from ephemeron.errors import JobError
from ephemeron.functions.simulation import run
from ephemeron.training.collectives import Group, KReduce, collective_for
from ephemeron.training.collectives.chunks import IN_FLIGHT_BYTES, chunks
from ephemeron.training.collectives.kreduce import PREFETCHED
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.tensors import HEADER_BYTES

BOTH_FORMS = pytest.mark.parametrize("pattern", ["k-reduce", "pipelined"])


@st.composite
def exchanges(draw):
    """Numbers of workers, aggregators and elements (fewer than shards, too), and weights of which any may be 0."""
    world = draw(st.integers(1, 7))
    aggregators = draw(st.integers(1, world))
    size = draw(st.integers(1, 40))
    weights = draw(st.lists(st.integers(0, 64), min_size=world, max_size=world))
    seed = draw(st.integers(0, 999))
    return world, aggregators, size, weights, seed


@settings(max_examples=25, deadline=None)
@given(exchanges(), st.sampled_from([None, 1, 3, 1000]), st.sampled_from([np.float32, np.float64]))
def test_weighted_mean(case, chunk, dtype):
    world, aggregators, size, weights, seed = case
    vectors = random_vectors(world, size, seed=seed).astype(dtype)
    vectors[np.array(weights) == 0] = 0  # a sum over no samples
    found = Rounds(world, aggregators, chunk=chunk, jitter_s=0.02, seed=seed).mean(vectors, weights)
    assert found.tobytes() == in_rank_order(vectors, weights).tobytes()
    if sum(weights):
        true = vectors.astype(np.float64).sum(axis=0) / sum(weights)
        np.testing.assert_allclose(found, true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("world", "aggregators"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (4, 4), (7, 3)])
@pytest.mark.parametrize("store", [MemoryChannel, PolledChannel])
def test_exact_requests(world, aggregators, store):
    """FasDL, equations 3-24 and 3-25: K·W puts and 2K·(W−1) gets; each shard goes up and down as often as needed."""
    size, rounds = 12_000, 3
    trial = Rounds(world, aggregators, store=store())
    trial.reduce(random_vectors(rounds, world, size), [[1.0] * world] * rounds)
    total = sum((m.traffic for m in trial.meters[1:]), trial.meters[0].traffic)
    assert total.puts == rounds * aggregators * world
    assert total.gets == rounds * 2 * aggregators * (world - 1)
    assert total.bytes_up == rounds * world * (size * 4 + aggregators * HEADER_BYTES)
    assert total.bytes_down == rounds * 2 * (world - 1) * (size * 4 + aggregators * HEADER_BYTES)
    assert total.lists == 0
    if store is MemoryChannel:
        assert total.polls == 0


def test_alone_nothing_is_sent():
    trial = Rounds(1, 1)
    vectors = random_vectors(1, 10)
    assert trial.mean(vectors, [4.0]).tobytes() == in_rank_order(vectors, [4.0]).tobytes()
    assert trial.meters[0].puts == trial.meters[0].gets == 0


@pytest.mark.parametrize(("world", "aggregators"), [(2, 2), (4, 2), (5, 5), (6, 1)])
def test_plain_and_pipelined_give_the_same_bits(world, aggregators):
    vectors, weights = random_vectors(world, 10_007, seed=3), [float(r) for r in range(world)]
    plain = Rounds(world, aggregators).mean(vectors, weights)
    for chunk in (None, 1, 100, 4999):
        if chunk != 1:
            pipelined = Rounds(world, aggregators, pattern="pipelined", chunk=chunk).mean(vectors, weights)
            assert pipelined.tobytes() == plain.tobytes()


@BOTH_FORMS
@pytest.mark.parametrize("store", [MemoryChannel, PolledChannel])
def test_order_of_arrival_does_not_matter(pattern, store):
    vectors, weights = random_vectors(5, 999, seed=1), [3.0, 1.0, 0.0, 2.0, 5.0]
    expected = in_rank_order(vectors, weights).tobytes()
    for seed in range(12):
        trial = Rounds(5, 3, pattern=pattern, jitter_s=0.1, start_jitter_s=0.3, seed=seed, store=store())
        assert trial.mean(vectors, weights).tobytes() == expected


def test_every_rank_sends_every_piece_in_an_order_of_its_own():
    whole = {(p.label, p.start, p.stop) for p in chunks(100, 4, 10)}
    orders = [[p.owner for p in chunks(100, 4, 10, rank)] for rank in range(4)]
    for rank, owners in enumerate(orders):
        assert {(p.label, p.start, p.stop) for p in chunks(100, 4, 10, rank)} == whole
        assert owners[0] == (rank + 1) % 4
    covered = sorted((p.start, p.stop) for p in chunks(100, 4, 10))
    assert covered[0][0] == 0
    assert covered[-1][1] == 100
    assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))


def test_the_server_form_gives_the_same_bits():
    vectors, weights = random_vectors(4, 501, seed=8), [1.0, 2.0, 3.0, 4.0]
    storage = Rounds(4, 2).mean(vectors, weights)
    trial = Rounds(4, 2, pattern="parameter-server", jitter_s=0.05)
    assert trial.mean(vectors, weights).tobytes() == storage.tobytes()
    total = sum((m.traffic for m in trial.meters[1:]), trial.meters[0].traffic)
    assert (total.puts, total.gets) == (4 * 2, 4 * 2)


def test_a_server_form_needs_a_server():
    with pytest.raises(JobError, match="can add"):
        Rounds(2, 1, pattern="parameter-server", store=MemoryChannel()).mean(random_vectors(2, 4), [1, 1])


@pytest.mark.parametrize(("compression", "relative"), [("bf16", 2**-8), ("int8", 1 / 127)])
def test_compression_error_is_bounded(compression, relative):
    """bf16 rounds by at most half a unit in the last of its 8 bits, int8 by half a step of a block's grid, twice."""
    vectors, weights = random_vectors(4, 5000, seed=5), [1.0] * 4
    exact = Rounds(4, 2).mean(vectors, weights).astype(np.float64)
    found = Rounds(4, 2, compression=compression).mean(vectors, weights).astype(np.float64)
    bound = relative * np.abs(vectors).max(axis=1).mean() + 2**-8 * np.abs(exact)
    assert np.abs(found - exact).max() <= bound.max()
    assert np.abs(found - exact).max() > 0


@st.composite
def sparse_exchanges(draw):
    """Vectors of which a rank has few elements, none, or all; some elements are minus zero."""
    world, aggregators, size, weights, seed = draw(exchanges())
    dice, size = np.random.default_rng(seed), 50 * size
    vectors = random_vectors(world, size, seed=seed)
    for rank in range(world):
        vectors[rank, dice.random(size) > draw(st.sampled_from([0.0, 0.01, 0.2, 1.0]))] = draw(st.sampled_from([0.0, -0.0]))
    return world, aggregators, vectors, weights


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(sparse_exchanges(), st.sampled_from([None, 7, 1000]), st.sampled_from([np.float32, np.float64, np.float16]))
def test_sparse_contributions_give_the_bits_of_dense_ones(case, chunk, dtype):
    world, aggregators, vectors, weights = case
    dense, sparse = (
        Rounds(world, aggregators, chunk=chunk, compression=compression).mean(vectors.astype(dtype), weights)
        for compression in ("none", "sparse")
    )
    assert sparse.tobytes() == dense.tobytes()


def test_sparse_messages_are_as_small_as_what_is_not_zero():
    vectors = np.zeros((4, 65_536), np.float32)
    for rank in range(4):
        vectors[rank, rank::512] = 1

    def bytes_up(compression):
        trial = Rounds(4, 2, compression=compression)
        trial.mean(vectors, [1.0] * 4)
        return sum(m.bytes_up for m in trial.meters)

    assert bytes_up("sparse") < 0.02 * bytes_up("none")


def test_compressed_messages_are_smaller():
    def bytes_up(compression):
        trial = Rounds(4, 2, compression=compression)
        trial.mean(random_vectors(4, 65_536), [1.0] * 4)
        return sum(m.bytes_up for m in trial.meters)

    assert bytes_up("bf16") < 0.51 * bytes_up("none")
    assert bytes_up("int8") < 0.33 * bytes_up("none")  # contributions a quarter, merged shards half


def test_error_feedback_makes_the_running_mean_converge():
    """What int8 rounds away comes later: the mean over rounds nears the truth like 1/rounds."""
    rounds = 32
    vectors = np.repeat(random_vectors(1, 3, 2000, seed=2), rounds, axis=0)
    merged = Rounds(3, 1, compression="int8").reduce(vectors, [[1.0] * 3] * rounds)
    exact = vectors[0].astype(np.float64).mean(axis=0)
    found = np.array([versions[0].vector for versions in merged], dtype=np.float64)

    def worst(n):
        # merged vectors are bf16, whose own rounding does not average out
        return max(0.0, np.abs(found[:n].mean(axis=0) - exact).max() - 2**-8 * np.abs(exact).max())

    assert np.abs(found[0] - exact).max() > 4 * np.abs(found.mean(axis=0) - exact).max()
    assert worst(rounds) < 0.002


@BOTH_FORMS
def test_an_aggregator_holds_few_messages(pattern):
    """However many workers there are, only a few contributions are under way to an aggregator at once."""
    world, size = 24, 3_000_000
    found = {}

    async def scenario():
        store = MemoryChannel()

        async def worker(rank):
            channel = HighWater(store)
            group = Group(
                keys=Keys("r"),
                rank=rank,
                world=world,
                aggregators=1,
                channel=channel,
                policy=policy_for("bsp"),
                size=size,
                dtype=np.dtype(np.float32),
            )
            collective = collective_for(pattern, group)
            collective.submit(0, np.ones(size, np.float32), 1.0)
            if rank == 0:
                aggregation = asyncio.ensure_future(collective.reduce(0))
                await asyncio.sleep(1)
                found[pattern] = channel.most_waiting
                await aggregation
            await asyncio.sleep(2)
            if rank != 0:
                await exchange(collective, 0)

        await asyncio.gather(*(worker(rank) for rank in range(world)))

    run(scenario())
    largest = max(p.stop - p.start for p in chunks(size, 1, 250_000 if pattern == "pipelined" else None)) * 4
    per_piece = max(PREFETCHED, IN_FLIGHT_BYTES // largest)
    assert found[pattern] <= per_piece * (per_piece if pattern == "pipelined" else 1) < world


def test_small_messages_are_gathered_all_at_once():
    """With 40 workers a latency per four messages would be most of the round."""
    trial = Rounds(40, 1, compute_s=0)
    trial.mean(random_vectors(40, 16), [1.0] * 40)
    assert trial.seconds[0] < 3 * trial.latency_s


def test_storage_does_not_grow():
    """Objects that everybody has applied and saved are deleted: those of the last two rounds remain."""
    trial, rounds = Rounds(4, 2, saves=True), 20
    trial.reduce(random_vectors(rounds, 4, 8), [[1.0] * 4] * rounds)
    per_round = 2 * 3 + 2
    assert 0 < len(trial.store.objects) <= 2 * per_round


def test_repeating_an_iteration_is_harmless():
    """A replaced worker sends again what its predecessor sent, and gets the same version."""

    async def scenario():
        store = MemoryChannel()
        vectors = random_vectors(2, 50)

        def member(rank, attempt=0):
            group = Group(
                keys=Keys("r"),
                rank=rank,
                world=2,
                aggregators=2,
                channel=store,
                policy=policy_for("bsp"),
                size=50,
                dtype=np.dtype(np.float32),
                attempt=attempt,
            )
            return KReduce(group)

        async def round_of(collective, rank):
            collective.submit(0, vectors[rank], 1.0)
            return await exchange(collective, 0)

        first = await asyncio.gather(round_of(member(0), 0), round_of(member(1), 1))
        again = await round_of(member(1, attempt=1), 1)
        assert again.vector.tobytes() == first[0].vector.tobytes() == in_rank_order(vectors, [1, 1]).tobytes()
        late = member(0, attempt=1)
        assert await late.pending(0) == (False, False)
        late.submit(0, vectors[0], 1.0)
        late.take_over(0, uploaded=True)
        assert (await late.wait(0)).vector.tobytes() == again.vector.tobytes()

    run(scenario())


class NeverEarly(Wrapper):
    """Counts deletions, and refuses those of contributions that a rank has not applied."""

    def __init__(self, inner: Channel, rounds: Rounds) -> None:
        super().__init__(inner)
        self.rounds, self.deleted = rounds, 0

    async def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        for key in keys:
            version, kind, *_ = key.removeprefix(Keys("r").exchanged).split(".")
            if kind == "c":
                self.deleted += 1
                applied = [c.g.status.applied for c in self.rounds.collectives]
                assert min(applied) > int(version), f"{key} is deleted, ranks have applied {applied}"
        await super().delete(keys)


@pytest.mark.parametrize(("world", "aggregators", "chunk"), [(2, 1, None), (4, 2, None), (4, 4, 8)])
def test_contributions_stay_until_every_rank_has_applied_their_version(world, aggregators, chunk):
    """Until then a lost merged object can be made again from them, by this rank or a replacement."""
    rounds = Rounds(world, aggregators, chunk=chunk, saves=True)
    rounds.store = store = NeverEarly(MemoryParameterServer(), rounds)
    count = 6
    rounds.reduce(random_vectors(count, world, 32), [[1.0] * world] * count)
    assert store.deleted == (count - 1) * aggregators * (world - 1) * (1 if chunk is None else 32 // world // chunk)
