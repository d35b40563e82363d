"""Of all ranks that wait, the one that has published no wait is suspected."""

import asyncio

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.keys import Keys
from ephemeron.functions import simulation
from ephemeron.training.collectives import StalledPeers
from ephemeron.training.worker.recovery.wait_for_graph import WaitForGraph

TIMEOUT_S = 20.0


def suspects(waits, *, asks, after_s=0.0, old=(), at=None):
    """Ranks that `asks` suspects. `waits`: for whom each living rank waits; `old`: waits published long ago."""

    async def go():
        channel, loop = MemoryChannel(), asyncio.get_running_loop()

        def of(rank):
            return WaitForGraph(channel, Keys("run"), rank=rank, now=loop.time, timeout_s=lambda times: times * TIMEOUT_S)

        for rank, ranks in old:
            await of(rank).suspects(StalledPeers(1, ranks))
        await asyncio.sleep(after_s)
        others = [asyncio.create_task(of(r).suspects(StalledPeers((at or {}).get(r, 7), ranks))) for r, ranks in waits.items() if r != asks]
        found = await of(asks).suspects(StalledPeers((at or {}).get(asks, 9), waits[asks]))
        await asyncio.gather(*others)
        return found

    return simulation.run(go())


def test_the_one_that_is_waited_for_and_silent():
    assert suspects({0: [1]}, asks=0) == [(1, 9)]


def test_the_end_of_a_chain_with_what_is_missed_of_it():
    assert suspects({0: [1], 1: [2], 2: [3]}, asks=0) == [(3, 7)]


def test_several_at_once():
    assert suspects({0: [1, 2], 1: [3], 2: [4]}, asks=0) == [(3, 7), (4, 7)]


def test_the_search_ends_when_what_is_missing_comes():
    async def go():
        channel, loop = MemoryChannel(), asyncio.get_running_loop()
        graph = WaitForGraph(channel, Keys("run"), rank=0, now=loop.time, timeout_s=lambda times: times * TIMEOUT_S)
        search = asyncio.create_task(graph.suspects(StalledPeers(7, [1, 2], ["run/a", "run/b"])))
        for key in ("run/a", "run/b"):
            await asyncio.sleep(1.0)
            assert not search.done()
            await channel.put(key, [b"data"])
        return await search, loop.time()

    found, took_s = simulation.run(go())
    assert found == []
    assert round(took_s, 3) == 2.0


def test_a_rank_past_the_missing_iteration_has_to_send_it_again():
    assert suspects({0: [1], 1: [0]}, asks=0, at={0: 7, 1: 8}) == [(1, 7)]
    assert suspects({0: [1], 1: [0]}, asks=1, at={0: 7, 1: 8}) == []  # rank 0 will replace it


def test_in_a_cycle_each_rank_replaces_the_next():
    ring = {0: [1], 1: [2], 2: [0]}
    assert [suspects(ring, asks=r, at=dict.fromkeys(ring, 7)) for r in ring] == [[(1, 7)], [(2, 7)], [(0, 7)]]
    assert suspects({**ring, 3: [0]}, asks=3, at=dict.fromkeys(range(4), 7)) == []  # not in it


def test_what_was_said_long_ago_counts_no_more():
    assert suspects({0: [1]}, asks=0, after_s=2 * TIMEOUT_S, old=[(1, [2])]) == [(1, 9)]
    assert suspects({0: [1]}, asks=0, after_s=0.5 * TIMEOUT_S, old=[(1, [2])]) == [(2, 1)]
