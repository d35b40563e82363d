"""The reduction in two levels: one order of summation, fewer bytes between machines, and nothing lost with any rank."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from direct_groups import members, rounds
from groups import exchange, random_vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.communication.direct.message import Kind
from ephemeron.functions.simulation import run
from ephemeron.testing.direct_world import until
from ephemeron.training.tensors import STOP


def by_blocks(vectors: np.ndarray, weights: list[float], size: int) -> np.ndarray:
    """The mean, added up by rank within each block and then by block."""

    def added(parts):
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        return total

    total = added([added(vectors[at : at + size]) for at in range(0, len(vectors), size)])
    weight = sum(weights)
    return total / total.dtype.type(weight) if weight else total


@st.composite
def exchanges(draw):
    """Numbers of workers, owners, ranks per machine and elements, and weights of which any may be 0, for two rounds."""
    world = draw(st.integers(2, 9))
    owners, block = draw(st.integers(1, world)), draw(st.integers(1, world))
    size = draw(st.sampled_from([1, 7, 1025, 9001]))
    weights = draw(st.lists(st.lists(st.integers(0, 64), min_size=world, max_size=world), min_size=2, max_size=2))
    return world, owners, block, size, weights, draw(st.integers(0, 999))


def reduced(case, *, compression="none", dtype=np.float32, jitter_seed=0):
    world, owners, block, size, weights, seed = case
    vectors = random_vectors(2, world, size, seed=seed).astype(dtype)
    vectors[np.array(weights) == 0] = 0

    async def scenario():
        async with members(
            world, owners, size=size, dtype=dtype, compression=compression, piece_bytes=4096, one_phase_bytes=0, ranks_per_machine=block
        ) as group:
            return await rounds(group, vectors, weights, jitter_s=0.01, seed=jitter_seed)

    return vectors, [[(merged.vector.tobytes(), merged.flags) for merged in found] for found in run(scenario())]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(exchanges(), st.sampled_from([np.float32, np.float64]))
def test_sums_by_rank_within_a_block_and_then_by_block(case, dtype):
    vectors, found = reduced(case, dtype=dtype)
    for t, versions in enumerate(found):
        assert {vector for vector, _ in versions} == {by_blocks(vectors[t], case[4][t], case[2]).tobytes()}


@settings(max_examples=20, deadline=None)
@given(exchanges(), st.sampled_from(["bf16", "int8", "sparse"]))
def test_compressed_sums_do_not_depend_on_timing(case, compression):
    _, found = reduced(case, compression=compression)
    assert all(len(set(versions)) == 1 for versions in found)
    assert reduced(case, compression=compression, jitter_seed=1)[1] == found


@pytest.mark.parametrize(("world", "block", "crossing"), [(8, 4, 2 * 1), (8, 2, 2 * 3), (6, 3, 2 * 1)])
def test_bytes_between_machines(world, block, crossing):
    """2 (M − 1) of the vector cross in each round, with M machines; in one level W − L times as much for each rank."""
    vectors, sent = random_vectors(1, world, 4096 * world), 0

    async def scenario():
        nonlocal sent
        async with members(world, size=4096 * world, one_phase_bytes=0, ranks_per_machine=block) as group:
            for rank, collective in group.by_rank.items():

                def counted(to, kind, number, part, extra, buffers, rank=rank, send=collective.mesh.send):
                    nonlocal sent
                    if to // block != rank // block and kind != Kind.PRIVATE:
                        sent += sum(memoryview(b).nbytes for b in buffers)
                    return send(to, kind, number, part, extra, buffers)

                collective.mesh.send = counted
            await rounds(group, vectors, [[1.0] * world])

    run(scenario())
    assert sent == crossing * vectors[0, 0].nbytes


@pytest.mark.parametrize("latency_s", [0.0, 0.2])
def test_connections_that_break_during_rounds(latency_s):
    vectors, weights = random_vectors(30, 5, 5000, seed=4), [[1.0, 2.0, 0.0, 4.0, 5.0]] * 30

    async def scenario():
        async with members(5, piece_bytes=4096, one_phase_bytes=0, latency_s=latency_s, patient=True, ranks_per_machine=2) as group:
            dice, breaks = np.random.default_rng(1), 0

            async def breaking():
                nonlocal breaks
                while True:
                    a, b = (int(r) for r in dice.choice(5, 2, replace=False))
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
        assert {m.vector.tobytes() for m in merged} == {by_blocks(vectors[t], weights[t], 2).tobytes()}


@pytest.mark.parametrize("after_s", [0.0015, 0.0025, 0.0035, 0.0045])
@pytest.mark.parametrize("victim", range(4))
def test_a_replacement_sends_its_contribution_again(victim, after_s):
    """Each rank dies at each step of a round: contributions, partial sums, means and what is passed on arrive 1 ms after each other."""
    vectors, weights = random_vectors(4, 4, 5000, seed=2), [1.0, 2.0, 3.0, 4.0]

    async def scenario():
        async with members(4, 4, piece_bytes=4096, one_phase_bytes=0, ranks_per_machine=2, replays=False) as group:
            got: dict[tuple[int, int], bytes] = {}

            async def worker(rank, first):
                collective = group.by_rank[rank]
                for t in range(first, 4):
                    collective.g.status.applied = collective.g.status.durable = t
                    collective.submit(t, vectors[t, rank], weights[rank])
                    got[rank, t] = (await exchange(collective, t)).vector.tobytes()

            tasks = {rank: asyncio.ensure_future(worker(rank, 0)) for rank in range(4)}
            await asyncio.sleep(after_s)
            first = group.by_rank[victim].g.status.applied
            group.die(victim)
            tasks.pop(victim).cancel()
            await asyncio.sleep(0.5)
            await group.join(victim, attempt=1)
            await asyncio.gather(worker(victim, first), *tasks.values())
            return got

    for (rank, t), merged in run(scenario()).items():
        assert merged == by_blocks(vectors[t], weights, 2).tobytes(), (rank, t)


def test_all_learn_the_flags_of_all():
    async def scenario():
        async with members(5, one_phase_bytes=0, ranks_per_machine=2) as group:

            async def worker(rank, flags):
                group.by_rank[rank].submit(0, np.ones(group.size, np.float32), 1.0, flags)
                return (await exchange(group.by_rank[rank], 0)).flags

            found = await asyncio.gather(*(worker(r, f) for r, f in enumerate([0, 0, 0, STOP, 0])))
            assert found == [STOP] * 5

    run(scenario())


def test_the_stalled_rank_is_found_in_another_block():
    """All wait for rank 3, of which only rank 2 gets a share of the block's contributions."""

    async def scenario():
        async with members(4, 1, one_phase_bytes=0, ranks_per_machine=2) as group:
            group.die(3)
            await until(lambda: not any(group.by_rank[r].mesh.connected(3) for r in range(3)))

            async def worker(rank):
                group.by_rank[rank].submit(4, np.ones(group.size, np.float32), 1.0)
                with pytest.raises(Exception, match="ranks=") as late:
                    await exchange(group.by_rank[rank], 4)
                return late.value.stalled.ranks

            assert await asyncio.gather(*(worker(r) for r in range(3))) == [[3]] * 3

    run(scenario())


def test_versions_and_memory_of_sums_are_kept_until_no_rank_needs_them():
    async def scenario():
        async with members(5, replays=False, one_phase_bytes=0, ranks_per_machine=3) as group:
            await rounds(group, random_vectors(10, 5, 5000), [[1.0] * 5] * 10)
            for collective in group.by_rank.values():
                assert len(collective._versions) <= 2
                assert len(collective._scratch) <= 2

    run(scenario())
