"""Signatures: what was changed, moved, or signed with another key is refused."""

from __future__ import annotations

import asyncio
import pickle
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.keys import Keys, is_signed
from ephemeron.communication.object_frame import sealed
from ephemeron.communication.signing import SIGNATURE_BYTES, SigningKey, create_key, read_key
from ephemeron.errors import SignatureRefused
from ephemeron.functions.base import Call

KEY = SigningKey.from_text("11" * 32)


def joined(buffers) -> bytes:
    return b"".join(bytes(b) for b in buffers)


def test_what_was_signed_is_verified_whole_and_without_a_copy():
    data = joined(KEY.signed([b"ab", memoryview(b"c"), bytearray(b"d")], name="run/code"))
    assert len(data) == SIGNATURE_BYTES + 4
    body = KEY.verified(data, name="run/code")
    assert bytes(body) == b"abcd"
    assert body.obj is data


def test_a_derived_key_is_of_one_name_and_is_no_signature():
    derived = KEY.derived("trial-0")
    assert derived == SigningKey.from_text(KEY.text).derived("trial-0")
    assert len({KEY, derived, KEY.derived("trial-1"), derived.derived("trial-0")}) == 4
    assert len(derived.secret) == len(KEY.secret)
    for name, content in (("trial-0", b""), ("", b"trial-0"), ("\xff" * 8, b"trial-0")):
        assert derived.secret not in joined(KEY.signed([content], name=name))


@given(st.binary(max_size=300), st.data())
def test_any_changed_byte_is_noticed(content, draw):
    data = bytearray(joined(KEY.signed([content], name="run/spec")))
    place = draw.draw(st.integers(0, len(data) - 1))
    data[place] ^= 1 << draw.draw(st.integers(0, 7))
    with pytest.raises(SignatureRefused):
        KEY.verified(bytes(data), name="run/spec")


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        (SigningKey.from_text("22" * 32), "run/spec", "does not match"),
        (KEY, "run/code", "does not match"),
        (KEY, "run2/spec", "does not match"),
    ],
)
def test_another_key_or_name_is_refused(key, name, said):
    data = joined(KEY.signed([b"{}"], name="run/spec"))
    with pytest.raises(SignatureRefused, match=said):
        key.verified(data, name=name)


@pytest.mark.parametrize("data", [b"", b"{}", b"x" * 500])
def test_an_object_without_a_signature_is_refused(data):
    with pytest.raises(SignatureRefused, match=r"not signed.*\(key run/spec\)"):
        KEY.verified(data, name="run/spec")


def test_a_key_file_is_for_its_owner_only_and_is_never_replaced(tmp_path):
    path = tmp_path / "signing.key"
    key = create_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key(path) == key
    assert len(key.secret) == 32
    with pytest.raises(FileExistsError):
        create_key(path)
    path.write_text("no key\n")
    with pytest.raises(SignatureRefused, match="hexadecimal"):
        read_key(path)


def test_no_key_is_printed():
    call = Call(run="r", rank=0, attempt=0, memory_mb=128, lifetime_s=1.0, channel="folder", key=KEY.text)
    assert KEY.text not in repr(call)
    assert KEY.text not in repr(KEY) + str(KEY)
    assert repr(KEY.secret) not in repr(KEY)


def test_what_is_executed_or_decoded_is_signed_and_what_is_exchanged_is_not():
    keys = Keys("run")
    signed = (
        keys.spec,
        keys.code,
        keys.init,
        keys.data(0),
        keys.test(1),
        keys.state(0, 3),
        keys.result,
        keys.kept(1),
        keys.stage(0),
        keys.initial(0),
        keys.part(0),
        keys.members(1),
    )
    assert all(map(is_signed, signed))
    others = (keys.contribution(1, 0, 0), keys.merged(1, 0), keys.between(1, "a", 0, 1, 0, 0), keys.claim(0, 1), keys.control)
    assert not any(map(is_signed, others))


def test_a_channel_with_a_key_signs_and_refuses():
    async def go():
        store, keys = MemoryChannel(), Keys("run")
        mine = RunChannel(store, owner="client", signing=KEY)
        await mine.put(keys.code, [b"ab", b"c"])
        await mine.put(keys.merged(0, 0), [b"sum"])
        assert bytes(await mine.fetch(keys.code)) == b"abc"
        reader = RunChannel(store, owner="function", signing=KEY)
        now = asyncio.get_running_loop().time()
        assert bytes((await reader.get(keys.code, deadline=now)).data) == b"abc"
        assert bytes((await reader.get(keys.merged(0, 0), deadline=now)).data) == b"sum"
        evil = pickle.dumps("anything")
        await store.put(keys.code, sealed([evil], key=keys.code))  # the frame's checksum is no signature
        for refused in (reader.fetch(keys.code), reader.get(keys.code, deadline=now)):
            with pytest.raises(SignatureRefused, match="not signed"):
                await refused

    asyncio.run(go())


def test_a_channel_may_sign_everything():
    async def go():
        store = MemoryChannel()
        mine = RunChannel(store, owner="client", signing=KEY, signs=lambda key: True)
        await mine.put("run.tasks/log-1", [b"a pickle"], create=True)
        assert bytes(await mine.fetch("run.tasks/log-1")) == b"a pickle"
        other = RunChannel(store, owner="other", signing=SigningKey.new(), signs=lambda key: True)
        with pytest.raises(SignatureRefused, match="does not match"):
            await other.fetch("run.tasks/log-1")

    asyncio.run(go())
