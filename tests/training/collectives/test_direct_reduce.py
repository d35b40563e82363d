"""The reduction over a mesh: the bits of K-REDUCE, whatever is sent twice, late, or lost with its sender."""

from __future__ import annotations

import asyncio
import itertools
import weakref

import numpy as np
import pytest
from direct_groups import Late, members, rounds
from groups import Rounds, exchange, in_rank_order, random_vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.functions.simulation import run
from ephemeron.testing.direct_world import until
from ephemeron.training.collectives import KReduce, StalledPeers, collective_for
from ephemeron.training.collectives.direct import DirectReduce
from ephemeron.training.collectives.direct_messages import Division, layout, pack_indices, unpack_indices
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.tensors import HAND_OFF, STOP

BOTH_FORMS = pytest.mark.parametrize("one_phase_bytes", [0, 1 << 30])
"""Pieces summed by their owners; vectors sent whole."""


@st.composite
def exchanges(draw):
    """Numbers of workers, owners and elements, and weights of which any may be 0, for two rounds."""
    world = draw(st.integers(2, 8))
    owners = draw(st.integers(1, world))
    size = draw(st.sampled_from([1, 7, 40, 1024, 1025, 9001]))
    weights = draw(st.lists(st.lists(st.integers(0, 64), min_size=world, max_size=world), min_size=2, max_size=2))
    return world, owners, size, weights, draw(st.integers(0, 999))


@settings(max_examples=30, deadline=None)
@given(
    exchanges(),
    st.sampled_from(["none", "bf16", "int8", "sparse"]),
    st.sampled_from([np.float32, np.float64, np.float16]),
    st.sampled_from([0, 1 << 30]),
    st.sampled_from([0, 10_000]),
)
def test_same_bits_as_over_the_store(case, compression, dtype, one_phase_bytes, shard_bytes):
    world, owners, size, weights, seed = case
    vectors = random_vectors(2, world, size, seed=seed).astype(dtype)
    vectors[np.array(weights) == 0] = 0
    if compression == "sparse":
        vectors[np.random.default_rng(seed).random(vectors.shape) < 0.9] = 0
    stored = Rounds(world, owners, compression=compression).reduce(vectors, weights)

    async def scenario():
        async with members(
            world,
            owners,
            size=size,
            dtype=dtype,
            compression=compression,
            piece_bytes=4096,
            one_phase_bytes=one_phase_bytes,
            shard_bytes=shard_bytes,
        ) as group:
            return await rounds(group, vectors, weights, jitter_s=0.01, seed=seed)

    for ours, theirs in zip(run(scenario()), stored, strict=True):
        assert {merged.vector.tobytes() for merged in ours} == {theirs[0].vector.tobytes()}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 9), st.sampled_from([2, 4, 8]), st.sampled_from([1, 4096, 10_000]))
def test_pieces_cover_the_vector_at_the_blocks_of_the_codec(size, owners, itemsize, piece_bytes):
    pieces = layout(size, owners, itemsize, piece_bytes=piece_bytes)
    covered = sorted((p.start, p.stop) for p in pieces)
    assert [p.number for p in pieces] == list(range(len(pieces)))
    assert covered[0][0] == 0
    assert covered[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
    assert {p.owner for p in pieces} == set(range(owners))
    assert all(p.offset % 1024 == 0 for p in pieces)


@pytest.mark.parametrize(
    ("cores", "elements", "owners"), [(0, 12_000, 4), (2, 100_000, 1), (2, 300_000, 2), (2, 10_000_000, 4), (16, 100_000, 4)]
)
def test_small_vectors_have_fewer_owners(cores, elements, owners):
    async def scenario():
        async with members(4, size=elements) as group:
            g = group.by_rank[0].g
            g.shared_cores = cores
            assert {p.owner for p in collective_for("k-reduce", g).pieces} == set(range(owners))
            g.policy = policy_for("hap")
            assert {p.owner for p in collective_for("k-reduce", g).pieces} == set(range(4))

    run(scenario())


@given(st.sets(st.integers(0, 99)))
def test_sets_of_pieces(indices):
    assert unpack_indices(pack_indices(indices, 100)) == sorted(indices)


def test_the_mesh_is_chosen_where_results_do_not_depend_on_timing():
    async def scenario():
        async with members(2) as group:
            for sync, kind in [("bsp", DirectReduce), ("hap", DirectReduce), ("ssp:2", KReduce), ("asp", KReduce)]:
                group.sync = sync
                found = collective_for("k-reduce", (await group.join(0, attempt=1 + len(group.net.meshes))).g)
                assert isinstance(found, kind)

    run(scenario())


@BOTH_FORMS
def test_all_learn_the_flags_of_all(one_phase_bytes):
    async def scenario():
        async with members(3, one_phase_bytes=one_phase_bytes) as group:

            async def worker(rank, flags):
                group.by_rank[rank].submit(0, np.ones(group.size, np.float32), 1.0, flags)
                return (await exchange(group.by_rank[rank], 0)).flags

            found = await asyncio.gather(*(worker(r, f) for r, f in enumerate([0, STOP, HAND_OFF])))
            assert found == [STOP | HAND_OFF] * 3

    run(scenario())


@BOTH_FORMS
@pytest.mark.parametrize("latency_s", [0.0, 0.2])
def test_connections_that_break_during_rounds(one_phase_bytes, latency_s):
    vectors, weights = random_vectors(40, 4, 5000, seed=4), [[1.0, 2.0, 0.0, 4.0]] * 40

    async def scenario():
        async with members(4, piece_bytes=4096, one_phase_bytes=one_phase_bytes, latency_s=latency_s, patient=True) as group:
            dice, breaks = np.random.default_rng(1), 0

            async def breaking():
                nonlocal breaks
                while True:
                    a, b = (int(r) for r in dice.choice(4, 2, replace=False))
                    group.network.partition(a, b)
                    breaks += 1
                    await asyncio.sleep(dice.exponential(0.1))
                    group.network.heal(a, b)
                    await asyncio.sleep(dice.exponential(0.1 + latency_s))

            task = asyncio.ensure_future(breaking())
            found = await rounds(group, vectors, weights, jitter_s=0.02)
            task.cancel()
            assert breaks > 3
            return found

    for t, merged in enumerate(run(scenario())):
        assert {m.vector.tobytes() for m in merged} == {in_rank_order(vectors[t], weights[t]).tobytes()}


@BOTH_FORMS
@pytest.mark.parametrize("compression", ["none", "bf16", "sparse"])
@pytest.mark.parametrize(
    ("world", "cut", "stored"),
    [(2, [(0, 1)], True), (3, [(0, 1)], False), (3, [(0, 1), (0, 2)], True), (4, [(0, 1), (0, 2), (0, 3), (1, 2)], True)],
)
def test_pairs_that_cannot_connect(world, cut, stored, compression, one_phase_bytes):
    """Through a third rank; where there is none, through the store."""
    vectors, weights = random_vectors(4, world, 5000, seed=5), [[1.0] * world] * 4
    plain = Rounds(world, world, compression=compression).reduce(vectors, weights)

    async def scenario():
        async with members(world, cut=cut, compression=compression, piece_bytes=4096, one_phase_bytes=one_phase_bytes) as group:
            found = await rounds(group, vectors, weights)
            routes = {c.mesh.transport_of(rank) for c in group.by_rank.values() for rank in c.others}
            assert ("store" in routes) == stored
            return found

    for ours, theirs in zip(run(scenario()), plain, strict=True):
        assert {merged.vector.tobytes() for merged in ours} == {theirs[0].vector.tobytes()}


def test_a_pair_that_loses_its_only_route_goes_on_through_the_store():
    vectors, weights = random_vectors(6, 2, 5000, seed=5), [[1.0] * 2] * 6

    async def scenario():
        async with members(2) as group:
            found = asyncio.ensure_future(rounds(group, vectors, weights, jitter_s=0.1))
            await asyncio.sleep(0.2)
            group.network.partition(0, 1)
            return await found

    for t, merged in enumerate(run(scenario())):
        assert {m.vector.tobytes() for m in merged} == {in_rank_order(vectors[t], weights[t]).tobytes()}


@BOTH_FORMS
def test_what_is_sent_twice_counts_once(one_phase_bytes):
    vectors = random_vectors(1, 3, 5000, seed=9)

    async def scenario():
        async with members(3, piece_bytes=4096, one_phase_bytes=one_phase_bytes) as group:
            for collective in group.by_rank.values():
                send = collective.mesh.send

                def twice(*message, send=send):
                    send(*message)
                    return send(*message)

                collective.mesh.send = twice
            return await rounds(group, vectors, [[1.0] * 3])

    (merged,) = run(scenario())
    assert {m.vector.tobytes() for m in merged} == {in_rank_order(vectors[0], [1.0] * 3).tobytes()}


@BOTH_FORMS
def test_a_replacement_goes_on_from_a_checkpoint(one_phase_bytes):
    """Rank 1 dies in iteration 5, whose pieces some ranks have; its replacement starts at iteration 2."""
    vectors = random_vectors(7, 3, 5000, seed=2)
    weights = [1.0, 2.0, 3.0]

    async def scenario():
        async with members(3, piece_bytes=4096, one_phase_bytes=one_phase_bytes) as group:
            got = {rank: {} for rank in range(3)}

            async def worker(rank, first, last, *, replays=False):
                collective = group.by_rank[rank]
                for t in range(first, last):
                    collective.g.status.applied, collective.g.status.durable = t, 2
                    upload = True
                    if replays:
                        upload, _ = await collective.pending(t)
                        replays = not upload
                    collective.submit(t, vectors[t, rank], weights[rank])
                    if not upload:
                        collective.take_over(t, uploaded=True)
                        got[rank][t] = await collective.wait(t)
                    else:
                        got[rank][t] = await exchange(collective, t)

            await asyncio.gather(*(worker(rank, 0, 5) for rank in range(3)))
            survivors = [asyncio.ensure_future(worker(rank, 5, 7)) for rank in (0, 2)]
            dying = group.by_rank[1]
            dying.submit(5, vectors[5, 1], weights[1])
            upload = asyncio.ensure_future(dying.upload(5))
            await asyncio.sleep(0.0015)  # its contributions have arrived, what it merges has not
            group.die(1)
            upload.cancel()
            await asyncio.sleep(1)
            assert not any(task.done() for task in survivors)
            await group.join(1, attempt=1)
            await asyncio.gather(worker(1, 2, 7, replays=True), *survivors)
            return got

    got = run(scenario())
    for rank in range(3):
        for t, merged in got[rank].items():
            assert merged.vector.tobytes() == in_rank_order(vectors[t], weights).tobytes(), (rank, t)


@BOTH_FORMS
def test_a_replacement_sends_the_flags_of_its_predecessor(one_phase_bytes):
    """Rank 0 has added up a contribution with a flag; the replacement of its sender, which has none, must not deny it."""

    async def scenario():
        async with members(3, one_phase_bytes=one_phase_bytes) as group:
            group.network.partition(1, 2, silent=True)  # rank 2 hears nothing of it
            dying = group.by_rank[1]
            dying.submit(0, np.ones(group.size, np.float32), 1.0, STOP)
            upload = asyncio.ensure_future(dying.upload(0))
            await asyncio.sleep(0.1)
            group.die(1)
            upload.cancel()
            group.network.heal(1, 2)
            replacement = await group.join(1, attempt=1)

            async def worker(collective, upload=True):
                collective.submit(0, np.ones(group.size, np.float32), 1.0)
                if upload:
                    return (await exchange(collective, 0)).flags
                collective.take_over(0, uploaded=True)
                return (await collective.wait(0)).flags

            others = [asyncio.ensure_future(worker(group.by_rank[rank])) for rank in (0, 2)]
            upload, _ = await replacement.pending(0)
            assert upload == (one_phase_bytes == 0)  # else rank 0 has added up all
            assert [await worker(replacement, upload), *await asyncio.gather(*others)] == [STOP] * 3

    run(scenario())


@pytest.mark.parametrize("owners", [1, 3])
def test_the_stalled_rank_is_found_behind_those_that_wait_for_it(owners):
    """All wait for owner 0, and owner 0 for rank 2, which is dead."""

    async def scenario():
        async with members(3, owners, one_phase_bytes=0) as group:
            group.die(2)
            await until(lambda: not group.by_rank[0].mesh.connected(2) and not group.by_rank[1].mesh.connected(2))

            async def worker(rank):
                group.by_rank[rank].submit(4, np.ones(group.size, np.float32), 1.0)
                with pytest.raises(Late) as late:
                    await exchange(group.by_rank[rank], 4)
                return late.value.stalled

            for stalled in await asyncio.gather(worker(0), worker(1)):
                assert stalled == StalledPeers(4, [2])

    run(scenario())


def test_a_slow_rank_that_answers_gets_some_more_time():
    async def scenario():
        async with members(2) as group:
            loop, ends = asyncio.get_running_loop(), {}

            async def worker(rank, after_s):
                await asyncio.sleep(after_s)
                group.by_rank[rank].submit(0, np.ones(group.size, np.float32), 1.0)
                await exchange(group.by_rank[rank], 0)
                ends[rank] = loop.time()

            await asyncio.gather(worker(0, 0), worker(1, 1.1 * group.timeout_s))
            assert max(ends.values()) < 1.2 * group.timeout_s
            group.by_rank[0].submit(1, np.ones(group.size, np.float32), 1.0)
            with pytest.raises(Late) as late:
                await exchange(group.by_rank[0], 1)
            assert list(late.value.stalled.ranks) == [1]

    run(scenario())


def test_what_one_rank_has_reaches_the_others_when_its_owner_dies():
    """Owner 0 has sent the merged piece to rank 1 only."""
    vectors = random_vectors(3, 5000, seed=6)

    async def scenario():
        async with members(3, 1, one_phase_bytes=0) as group:

            async def worker(rank):
                group.by_rank[rank].submit(0, vectors[rank], 1.0)
                return await exchange(group.by_rank[rank], 0)

            owner, lost = asyncio.ensure_future(worker(0)), asyncio.ensure_future(worker(2))
            await asyncio.sleep(0.5)
            group.network.partition(0, 2, silent=True)
            assert (await worker(1)).flags == 0
            await asyncio.sleep(0.5)
            assert owner.done()
            assert not lost.done()
            group.die(0)
            group.network.heal(0, 2)
            group.network.partition(0, 2)
            return await asyncio.wait_for(lost, 0.5)

    assert run(scenario()).vector.tobytes() == in_rank_order(vectors, [1.0] * 3).tobytes()


@pytest.mark.parametrize(("replays", "kept"), [(True, 6), (False, 1)])
def test_versions_are_kept_until_no_rank_needs_them(replays, kept):
    """All ranks have applied every version, and have checkpoints up to version 4."""

    async def scenario():
        async with members(3, replays=replays, one_phase_bytes=0) as group:

            async def worker(rank):
                collective = group.by_rank[rank]
                for t in range(10):
                    collective.g.status.applied, collective.g.status.durable = t, min(t, 4)
                    collective.submit(t, np.ones(group.size, np.float32), 1.0)
                    await exchange(collective, t)

            await asyncio.gather(*(worker(rank) for rank in range(3)))
            for collective in group.by_rank.values():
                await collective.collect_garbage()
                assert len(collective._versions) == kept
                assert collective.durable() == 4

    run(scenario())


@BOTH_FORMS
def test_memory_is_used_again_only_when_no_caller_has_it(one_phase_bytes):
    vectors = random_vectors(8, 2, 5000, seed=1)

    async def scenario():
        async with members(2, replays=False, one_phase_bytes=one_phase_bytes) as group:
            kept = await rounds(group, vectors[:4], [[1.0] * 2] * 4)
            held = [versions[0].vector[1000:] for versions in kept]
            before = [part.tobytes() for part in held]
            kept.clear()
            made = []

            async def worker(rank, t):
                collective = group.by_rank[rank]
                collective.g.status.applied = collective.g.status.durable = t
                collective.submit(t, vectors[t, rank], 1.0)
                made.append(weakref.ref((await exchange(collective, t)).vector))

            for t in range(4, 8):
                await asyncio.gather(worker(0, t), worker(1, t))
            assert [part.tobytes() for part in held] == before
            assert all(found() is not None for found in made)
            assert len({id(found()) for found in made}) < len(made)

    run(scenario())


def test_a_successor_gives_what_its_predecessor_has_merged():
    vectors = random_vectors(2, 5000, seed=6)

    async def scenario():
        async with members(2, 1, one_phase_bytes=0) as group:
            owner, other = group.by_rank[0], group.by_rank[1]
            other.submit(0, vectors[1], 1.0)
            await other.upload(0)
            await asyncio.sleep(0.1)
            group.network.partition(0, 1, silent=True)
            owner.submit(0, vectors[0], 1.0)
            await asyncio.gather(owner.upload(0), owner.reduce(0))
            state = owner.state()
            group.die(0)
            group.network.heal(0, 1)
            waits = asyncio.ensure_future(other.wait(0))
            successor = await group.join(0, attempt=1)
            successor.load(*state)
            return await asyncio.wait_for(waits, 20)

    assert run(scenario()).vector.tobytes() == in_rank_order(vectors, [1.0] * 2).tobytes()


def test_under_hap_a_contribution_may_change_once_it_is_sent():
    """A non-aggregator computes into the same memory while its contribution is still needed."""
    vectors = random_vectors(2, 5000, seed=3)

    async def scenario():
        async with members(2, 1, sync="hap", one_phase_bytes=0) as group:
            network, (owner, other) = group.network, (group.by_rank[0], group.by_rank[1])
            network.partition(0, 1)
            await until(lambda: not other.mesh.connected(0))
            memory = vectors[1].copy()
            other.submit(0, memory, 1.0)
            await other.upload(0)
            memory[:] = 0
            network.heal(0, 1)
            owner.submit(0, vectors[0], 1.0)
            merged = await exchange(owner, 0)
            assert merged.vector.tobytes() == in_rank_order(vectors, [1.0] * 2).tobytes()
            assert (await other.wait(0)).vector.tobytes() == merged.vector.tobytes()

    run(scenario())


def test_poll_tells_what_is_complete():
    async def scenario():
        async with members(2, sync="ssp:2") as group:
            a, b = group.by_rank[0], group.by_rank[1]
            a.submit(0, np.ones(group.size, np.float32), 1.0)
            await a.upload(0)
            assert not await a.poll(0)
            b.submit(0, np.ones(group.size, np.float32), 1.0)
            await b.upload(0)
            await a.wait(0)
            assert await a.poll(0)

    run(scenario())


def test_members_that_are_not_all_ranks_of_the_run():
    """Ranks 1 and 3 of a run of four reduce together."""
    vectors = random_vectors(2, 5000)

    async def scenario():
        async with members(4) as group:
            found = []
            for rank, member in enumerate((1, 3)):
                g = group.by_rank[member].g
                g.rank, g.world, g.aggregators, g.members = rank, 2, 2, (1, 3)
                found.append(DirectReduce(g, g.mesh, division=Division(whole_bytes=0)))

            async def worker(rank):
                found[rank].submit(0, vectors[rank], 1.0)
                return await exchange(found[rank], 0)

            return await asyncio.gather(worker(0), worker(1))

    for merged in run(scenario()):
        assert merged.vector.tobytes() == in_rank_order(vectors, [1.0] * 2).tobytes()
