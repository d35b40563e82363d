"""The store through its client: reads, pushes, shards, compression, keys, and one clear line for each mistake."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import pytest
from sparse_stores import TOKEN, on_loop, served

from ephemeron.errors import JobError, ServiceRefused, ServiceUnreachable, TokenRefused
from ephemeron.sparse.store import SGD, AdaGrad, BlockingSparseStore, Compression, Initial, SparseStore, Sum
from ephemeron.sparse.store.server import ShardServer
from ephemeron.sparse.store.state import ShardState
from ephemeron.testing._emulation.service import free_port

ROWS = 10_000


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("width", [1, 4])
@on_loop
async def test_reads_are_rows_in_the_order_of_the_indices(shards: int, width: int) -> None:
    async with served(shards) as (addresses, _), await SparseStore.connect(addresses, TOKEN) as store:
        await store.create("w", ROWS, width, optimizer=Sum(), initial=Initial(std=1.0, seed=1))
        whole = await store.read("w")
        assert whole.shape == (ROWS, width)
        rng = np.random.default_rng(2)
        for rows in (
            np.arange(10),
            rng.integers(0, ROWS, 500),
            np.sort(rng.integers(0, ROWS, 500)),
            np.array([ROWS - 1]),
            np.array([5, 5, 5]),
            np.array([], np.int64),
            np.arange(ROWS)[::-1],
        ):
            got = await store.multi_get("w", rows)
            np.testing.assert_array_equal(got, whole[rows])
            assert got.dtype == np.float32


@pytest.mark.parametrize("shards", [1, 3])
@on_loop
async def test_gradients_of_one_index_are_summed(shards: int) -> None:
    async with served(shards) as (addresses, _), await SparseStore.connect(addresses, TOKEN) as store:
        await store.create("w", ROWS, 2, optimizer=AdaGrad(learning_rate=1.0))
        await store.push("w", [9_000, 7, 9_000], [[1, 1], [2, 2], [3, 0]])
        got = await store.multi_get("w", [7, 9_000])
        np.testing.assert_allclose(got, [[-1, -1], [-1, -1]], rtol=1e-6)  # AdaGrad of 4 is -1; of 1 and 3 in turn, it is not


@on_loop
async def test_any_number_of_shards_gives_the_same_weights() -> None:
    results = []
    for shards in (1, 2, 5):
        rng = np.random.default_rng(3)
        async with served(shards) as (addresses, _), await SparseStore.connect(addresses, TOKEN) as store:
            await store.create("w", ROWS, 3, optimizer=AdaGrad(learning_rate=0.1), initial=Initial(std=0.1))
            for _ in range(20):
                await store.push("w", rng.integers(0, ROWS, 200), rng.standard_normal((200, 3)))
            results.append(await store.read("w"))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@on_loop
async def test_many_clients_at_once() -> None:
    async with served(2) as (addresses, servers):

        async def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            async with await SparseStore.connect(addresses, TOKEN) as store:
                await store.create("w", ROWS, optimizer=Sum())
                for _ in range(20):
                    rows = rng.choice(ROWS, 100, replace=False)
                    await store.multi_get("w", rows)
                    await store.push("w", rows, np.ones(100))

        await asyncio.gather(*(work(seed) for seed in range(40)))
        async with await SparseStore.connect(addresses, TOKEN) as store:
            assert (await store.read("w")).sum() == 40 * 20 * 100
            assert [s.clients for s in await store.status()] == [1, 1]  # anonymous ones are forgotten
    assert not any(server.connections for server in servers)


@on_loop
async def test_assign_and_keys() -> None:
    async with served(3) as (addresses, _), await SparseStore.connect(addresses, TOKEN) as store:
        await store.create("w", 100, optimizer=SGD(learning_rate=1))
        await store.assign("w", np.arange(100), np.arange(100))
        await store.push("w", [1], [0.5])
        assert (await store.multi_get("w", [0, 1, 99])).ravel().tolist() == [0, 0.5, 99]
        for number in range(20):
            await store.set(f"epoch/{number}", bytes([number]) * number)
        assert [await store.get(f"epoch/{n}") for n in range(20)] == [bytes([n]) * n for n in range(20)]
        assert await store.get("absent") is None


@pytest.mark.parametrize("values", ["float32", "float16", "int8"])
@pytest.mark.parametrize("shards", [1, 3])
@on_loop
async def test_compressed_gradients_arrive_in_the_end(values: str, shards: int) -> None:
    rng = np.random.default_rng(4)
    async with served(shards) as (addresses, _):
        compression = Compression(threshold=0.5, values=values)
        async with await SparseStore.connect(addresses, TOKEN, compression=compression) as store:
            await store.create("w", 300, 2, optimizer=Sum())
            total = np.zeros((300, 2))
            for _ in range(30):
                rows, gradient = rng.choice(300, 50, replace=False), rng.standard_normal((50, 2)) * 0.3
                total[rows] += gradient
                await store.push("w", rows, gradient)
            assert np.abs(await store.read("w") - total).max() > 0.1
            await store.push_residual("w")
            np.testing.assert_allclose(await store.read("w"), total, atol=1e-4)


@on_loop
async def test_float16_reads_and_short_encodings_take_fewer_bytes() -> None:
    rows = np.arange(0, ROWS, 10)
    async with served() as (addresses, _):
        received = {}
        for values in ("float32", "float16"):
            async with await SparseStore.connect(addresses, TOKEN, values=values) as store:
                await store.create("w", ROWS, optimizer=Sum(), initial=Initial(std=1, seed=1))
                up, down = store.bytes_up, store.bytes_down
                received[values] = await store.multi_get("w", rows)
                assert store.bytes_down - down == 48 + rows.size * (4 if values == "float32" else 2)
                assert store.bytes_up - up == 48 + rows.size  # one byte an index, the first in the head
        np.testing.assert_allclose(received["float16"], received["float32"], rtol=1e-3)


def test_the_blocking_client() -> None:
    async def main() -> None:
        async with served(2) as (addresses, _):
            await asyncio.to_thread(use, addresses)

    def use(addresses: list[str]) -> None:
        with BlockingSparseStore.connect(addresses, TOKEN) as store:
            store.create("w", 100, optimizer=Sum())
            store.push("w", [1, 99], [1, 2])
            store.flush()
            assert store.multi_get("w", [99, 1]).ravel().tolist() == [2, 1]
            store.set("key", b"value")
            assert store.get("key") == b"value"
            assert store.table("w").rows == 100
            assert sum(s.pushes for s in store.status()) == 2
            with pytest.raises(JobError, match="no table 'v'"):
                store.multi_get("v", [1])
        with pytest.raises(TokenRefused):
            BlockingSparseStore.connect(addresses, "another token")

    asyncio.run(main())


@on_loop
async def test_mistakes_are_one_line_each() -> None:
    async with served(2) as (addresses, _), await SparseStore.connect(addresses, TOKEN) as store:
        await store.create("w", 100, 2, optimizer=SGD(learning_rate=1))
        ones = np.ones((1, 2))
        for work, text in (
            (store.multi_get("v", [1]), "no table 'v'; create it first"),
            (store.multi_get("w", [100]), "index 100 is not in table 'w'; its indices are 0 to 99"),
            (store.multi_get("w", [5, -1]), "index -1 is not in table 'w'"),
            (store.multi_get("w", [0.5]), "indices are of type float64; give whole numbers"),
            (store.multi_get("w", [[1]]), "indices have the shape"),
            (store.push("w", [100], ones), "index 100 is not in table 'w'"),
            (store.push("w", [1], [1.0]), "rows of 2 values: a gradient of shape"),
            (store.push("w", [1, 2], ones), "does not match 2 indices"),
            (store.push("w", [1], [[1, np.nan]]), "NaN or infinite"),
            (store.assign("w", [1, 1], np.ones((2, 2))), "an index twice"),
            (store.create("w", 100, 2, optimizer=SGD(learning_rate=2)), "exists with optimizer"),
            (store.create("w", 101, 2, optimizer=SGD(learning_rate=1)), "exists with rows = 100, not 101"),
            (store.create("x", 0, optimizer=Sum()), "rows = 0 should be at least 1"),
            (store.snapshot(), "keeps no snapshots"),
        ):
            with pytest.raises(JobError, match=text) as caught:
                await work
            assert "\n" not in str(caught.value)
        await store.create("w", 100, 2, optimizer=SGD(learning_rate=1))  # the same again is no mistake
        await store.flush()
        assert (await store.read("w") == 0).all()


@on_loop
async def test_wrong_addresses_and_tokens() -> None:
    async with served(2) as (addresses, _):
        with pytest.raises(TokenRefused, match="refused our token"):
            await SparseStore.connect(addresses, "another token")
        with pytest.raises(JobError, match="this is shard 1 of 2, not 0 of 2; give the addresses of all shards"):
            await SparseStore.connect(addresses[::-1], TOKEN)
        with pytest.raises(JobError, match="shard 0 of 2, not 0 of 1"):
            await SparseStore.connect(addresses[:1], TOKEN)
    with pytest.raises(JobError, match="write HOST:PORT"):
        await SparseStore.connect(["here"], TOKEN)
    with pytest.raises(ServiceUnreachable, match=r"shard 0 of the sparse store at 127\.0\.0\.1"):
        await SparseStore.connect([f"127.0.0.1:{free_port()}"], TOKEN, connect_s=0.2)


@on_loop
async def test_a_table_of_another_client_is_found() -> None:
    async with served(2) as (addresses, _), await SparseStore.connect(addresses, TOKEN) as first:
        await first.create("w", 100, optimizer=Sum())
        async with await SparseStore.connect(addresses, TOKEN) as second:
            await second.push("w", [3, 70], [1, 1])
            await second.flush()
            assert (await second.table("w")).width == 1
        assert (await first.read("w")).sum() == 2


@on_loop
async def test_lost_connections_lose_and_repeat_nothing() -> None:
    async with served(2) as (addresses, servers), await SparseStore.connect(addresses, TOKEN) as store:
        await store.create("w", ROWS, optimizer=Sum())
        rng = np.random.default_rng(5)
        total = np.zeros(ROWS)

        async def cut() -> None:
            while True:
                await asyncio.sleep(0)
                for server in servers:
                    for connection in list(server.connections):
                        if rng.random() < 0.05:
                            connection.end(ConnectionResetError("cut by the test"))

        cutting = asyncio.create_task(cut())
        for number in range(300):
            rows = rng.choice(ROWS, 50, replace=False)
            total[rows] += 1
            await store.push("w", rows, np.ones(50))
            if number % 10 == 0:
                np.testing.assert_array_equal((await store.multi_get("w", rows)).ravel(), total[rows])
        cutting.cancel()
        await store.flush()
        np.testing.assert_array_equal((await store.read("w")).ravel(), total)
        assert store.reconnects > 5


@on_loop
async def test_what_a_client_repeats_is_made_once() -> None:
    async with served() as (addresses, _):
        async with await SparseStore.connect(addresses, TOKEN, client="rank-3") as store:
            await store.create("w", 10, optimizer=Sum())
            await store.set("key", b"value")  # what is no push has no number of the client's
            for number in (1, 2, 3):
                await store.push("w", [1], [1], sequence=number)
        async with await SparseStore.connect(addresses, TOKEN, client="rank-3", attempt=1) as store:
            assert store.sequence == 3
            await store.create("w", 10, optimizer=Sum())
            for number in (2, 3, 4):
                await store.push("w", [1], [1], sequence=number)
                async with asyncio.timeout(10):
                    await store.flush()  # also while the shard has all that is repeated
            assert (await store.multi_get("w", [1])).item() == 4
            assert (await store.status())[0].pushes == 4


@on_loop
async def test_a_replaced_client_changes_nothing_more() -> None:
    async with served() as (addresses, _), await SparseStore.connect(addresses, TOKEN, client="rank-3") as old:
        await old.create("w", 10, optimizer=Sum())
        async with await SparseStore.connect(addresses, TOKEN, client="rank-3", attempt=1) as new:
            with pytest.raises(ServiceRefused, match=r"attempt 0, has been replaced by attempt 1"):
                await old.read("w")
            with pytest.raises(ServiceRefused):
                await old.push("w", [1], [1])
            assert (await new.read("w")).sum() == 0
        with pytest.raises(ServiceRefused, match="has been replaced"):
            await SparseStore.connect(addresses, TOKEN, client="rank-3")
        await old.close(flush=False)


@on_loop
async def test_requests_fail_when_a_shard_stays_away() -> None:
    async with served() as (addresses, servers):
        store = await SparseStore.connect(addresses, TOKEN)
        await store.create("w", 10, optimizer=Sum())
        store.links[0]._connect_s = 0.2
        await servers[0].close()
        with pytest.raises(ServiceUnreachable, match="does not answer"):
            await store.multi_get("w", [1])
        with pytest.raises(ServiceUnreachable):
            await store.push("w", [1], [1])
        await store.close()


@on_loop
async def test_pushes_that_are_lost_for_good_are_not_forgotten_in_silence() -> None:
    async with served() as (addresses, servers):
        store = await SparseStore.connect(addresses, TOKEN)
        await store.create("w", 10, optimizer=Sum())
        store.links[0]._connect_s = 0.2
        await servers[0].close()
        await store.push("w", [1], [1])
        with pytest.raises(ServiceUnreachable, match="does not answer"):
            await store.multi_get("w", [1])
        with pytest.raises(ServiceUnreachable, match="does not answer"):
            await store.close()


@pytest.mark.parametrize("rows", [1 << 40, 1 << 50])
def test_a_table_that_fits_no_memory_is_refused_and_the_shard_goes_on(rows: int, caplog: pytest.LogCaptureFixture) -> None:
    @on_loop
    async def main() -> None:
        async with served() as (addresses, _), await SparseStore.connect(addresses, TOKEN) as store:
            with pytest.raises(JobError, match=r"the shard refuses this: Unable to allocate .* use more shards"):
                await store.create("w", rows, optimizer=Sum())
            await store.create("v", 10, optimizer=Sum())

    main()
    assert [r.levelname for r in caplog.records if r.name.startswith("ephemeron.sparse")] == ["WARNING"]
    assert not any(r.exc_info for r in caplog.records)  # no traceback where the store prints


@pytest.mark.parametrize("token", [TOKEN.encode(), bytearray(TOKEN.encode())])
@on_loop
async def test_a_token_may_be_the_bytes_of_its_file(token: bytes) -> None:
    async with served() as (addresses, _), await SparseStore.connect(addresses, token) as store:
        await store.set("key", b"value")


@pytest.mark.parametrize("token", ["", b"", b"\xff\xfe", None, 7, "wrong", b"wrong"])
@on_loop
async def test_a_token_that_is_none_or_another_is_refused_at_once(token: Any) -> None:
    async with served() as (addresses, _):
        with pytest.raises((JobError, TokenRefused)) as refused:
            await SparseStore.connect(addresses, token, connect_s=1e6)
    assert ("the token is" in str(refused.value)) == (token not in ("wrong", b"wrong"))


@on_loop
async def test_a_frozen_shard_is_left_for_one_that_answers() -> None:
    """A shard that takes bytes and answers nothing: the client asks for the address again, and finds its successor."""
    state = ShardState()
    frozen, live = ShardServer(ShardState(), token=TOKEN), ShardServer(state, token=TOKEN, attempt=1)
    places = [await frozen.listen(), await live.listen()]

    async def locate(shard: int) -> tuple[str, int]:
        return places[0] if len(places) == 2 else places[-1]

    store = await SparseStore.connect(locate, TOKEN, answer_s=0.2)
    await store.create("w", 10, optimizer=Sum())
    await store.flush()
    for connection in frozen.connections:
        assert connection.transport is not None
        connection.transport.pause_reading()
    places.pop(0)
    store._tables.clear()
    await store.create("w", 10, optimizer=Sum())
    await store.push("w", [1], [1])
    await store.flush()
    assert state.tables[0].weights[1] == 1
    await store.close()
    await frozen.close()
    await live.close()


@on_loop
async def test_bytes_of_another_protocol_end_a_connection_and_nothing_else() -> None:
    async with served() as (addresses, servers), await SparseStore.connect(addresses, TOKEN) as store:
        await store.create("w", 10, optimizer=Sum())
        host, port = addresses[0].split(":")
        for data in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"", b"ephemeron-rpc-3\n" + bytes(200)):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            if not data:
                writer.close()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await asyncio.wait_for(reader.readexactly(1 << 20), 10)
            writer.close()
        assert (await store.read("w")).sum() == 0
        assert len(servers[0].connections) == 1


@on_loop
async def test_neither_end_delays_small_frames() -> None:
    async with served() as (addresses, servers), await SparseStore.connect(addresses, TOKEN) as store:
        await store.create("w", 10, optimizer=Sum())
        (accepted,), link = servers[0].connections, store.links[0]
        assert link._wire is not None
        for protocol in (accepted, link._wire):
            assert protocol.transport is not None
            sock = protocol.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
