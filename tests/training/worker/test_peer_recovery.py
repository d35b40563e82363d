"""Choice of the state that a replacement takes, copies of private states, and checkpoints that all ranks have."""

from __future__ import annotations

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.keys import Keys
from ephemeron.functions import simulation
from ephemeron.testing.direct_world import memory_mesh, until
from ephemeron.training.worker.recovery.checkpoint import CommonCheckpoint, newest_common
from ephemeron.training.worker.recovery.peer_recovery import PeerStatus, Source, choose, is_lost
from ephemeron.training.worker.trainers.private_copies import PrivateCopies, PrivateMark, holders


def trains(at, *private, **more):
    return PeerStatus(training=True, gives=(at,), private=private, **more)


def test_the_most_advanced_state_of_which_both_parts_are_known_counts():
    assert choose({1: trains(8), 2: trains(7, 7), 3: trains(7)}, beginning=0) == Source(7, 2, 2)
    assert choose({1: trains(8, 7), 2: trains(7, 8)}, beginning=0) == Source(8, 1, 2)


def test_a_rank_that_recovers_may_keep_a_private_state_and_gives_none_itself():
    keeps = PeerStatus(private=(8,))
    assert choose({1: keeps}, beginning=0) is None
    assert choose({1: keeps, 2: trains(8)}, beginning=0) == Source(8, 2, 1)


def test_a_private_state_fits_to_states_of_its_own_kind_only():
    before = PeerStatus(training=True, gives=(6, 7), after_compute=False, private=(7,))
    assert choose({1: before}, beginning=0) is None
    kept = PeerStatus(private_before_compute=(6,))
    assert choose({1: before, 2: kept}, beginning=0) == Source(6, 1, 2)


def test_the_own_checkpoint_and_the_beginning_need_no_private_state():
    assert choose({1: trains(8)}, beginning=0, saved=[4, 8]) == Source(8, 1, None)
    assert choose({1: trains(5)}, beginning=5) == Source(5, 1, None)
    assert choose({1: trains(8)}, beginning=0, saved=[4]) is None


def test_a_private_state_is_lost_only_if_no_rank_keeps_one_that_others_may_still_come_to():
    assert is_lost({1: trains(8), 2: trains(8, 7)}, beginning=0)
    assert not is_lost({1: trains(7), 2: trains(7, 8)}, beginning=0), "rank 2 is about to apply what brings it there"
    assert not is_lost({1: trains(0)}, beginning=0)
    assert not is_lost({1: PeerStatus()}, beginning=0), "no rank trains: none has to go back"


def test_copies_of_the_last_two_iterations_are_kept_and_a_body_serves_until_it_changes():
    copies = PrivateCopies()
    for iteration, body, data in ((1, 1, b"a"), (2, 1, b""), (3, 1, b""), (4, 4, b"b")):
        copies.record(5, PrivateMark(iteration, body, True, False), memoryview(data))
    assert [m.iteration for m in copies.marks(5)] == [3, 4]
    assert copies.find(5, 3)[1] == b"a"
    assert copies.find(5, 4)[1] == b"b"
    assert copies.find(5, 2) is None
    assert copies.find(6, 4) is None


def test_a_mark_without_its_body_is_no_copy():
    copies = PrivateCopies()
    copies.record(1, PrivateMark(7, 6, True, False), memoryview(b""))
    assert copies.marks(1) == ()


def test_ranks_that_go_back_replace_what_was_kept_of_later_iterations():
    copies = PrivateCopies()
    for iteration in (9, 10, 4, 5):
        copies.record(1, PrivateMark(iteration, iteration, True, False), memoryview(b"x"))
    assert [m.iteration for m in copies.marks(1)] == [4, 5]


def test_a_mark_arrives_as_it_was_sent():
    mark = PrivateMark(7, 3, True, False, 0.25)
    assert PrivateMark.of(7, mark.pack()) == mark


def test_those_who_sum_keep_private_states_first():
    assert list(holders(0, 8, 8)) == [1, 2, 3]
    assert list(holders(6, 8, 8)) == [7, 0, 1]
    assert list(holders(5, 8, 2)) == [0, 1, 6]
    assert list(holders(1, 2, 2)) == [0]


def test_ranks_tell_each_other_which_checkpoints_they_have():
    async def go():
        async with memory_mesh(3) as meshes:
            ranks = [CommonCheckpoint(mesh, beginning=0) for mesh in meshes]
            for rank, stored in zip(ranks, ([4, 8], [4], [0, 4, 8]), strict=True):
                rank.stored(stored)
            await until(lambda: all(rank.iteration == 4 for rank in ranks))
            ranks[1].stored([4, 8])
            await until(lambda: all(rank.iteration == 8 for rank in ranks))

    simulation.run(go())


def test_the_newest_checkpoint_in_the_store_that_all_ranks_have():
    async def go():
        store, keys = MemoryChannel(), Keys("run")
        assert await newest_common(store, keys, ranks=2, beginning=0) == 0
        for rank, iteration in ((0, 4), (0, 8), (1, 4), (1, 12)):
            await store.put(keys.state(rank, iteration), [b"x"])
        assert await newest_common(store, keys, ranks=2, beginning=0) == 4
        assert await newest_common(store, keys, ranks=2, beginning=6) == 6

    simulation.run(go())
