"""Shipped functions are found again, by name with their bundle or by value; what is not signed is never loaded."""

from __future__ import annotations

import asyncio
import functools
import math
import operator
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.object_frame import sealed
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import CorruptMessage, JobError, SignatureRefused
from ephemeron.executor.shipping import Shipper
from ephemeron.functions.shipped_code import CodeKeys, CodeLoader, ShippedHeader, decode_function, dumps, encode_function
from ephemeron.user_code import unpickled

KEYS = CodeKeys("run.code")
KEY = SigningKey.new()


def signed(store) -> RunChannel:
    return RunChannel(store, owner="test", signing=KEY, signs=lambda key: True)


def shipped_and_loaded(function, scratch: Path | None = None):
    async def go():
        channel = signed(MemoryChannel())
        shipment = Shipper(KEYS).ship(function)
        for key, data in shipment.objects.items():
            await channel.put(key, [data])
        return shipment, await CodeLoader(channel, KEYS, scratch=scratch, timeout_s=0.1).load(shipment.reference)

    return asyncio.run(go())


def add(a, b=1):
    return a + b


def test_installed_functions_are_sent_by_name_alone(tmp_path):
    shipment, found = shipped_and_loaded(math.sqrt, tmp_path)
    assert (shipment.reference, shipment.objects) == ("math:sqrt", {})
    assert found(9.0) == 3.0
    assert shipped_and_loaded("operator:add", tmp_path)[1] is operator.add


def test_closures_lambdas_and_partials_are_sent_by_value(tmp_path):
    k = 3
    for function, want in ((lambda x: x * k, 15), (functools.partial(add, b=10), 15)):
        shipment, found = shipped_and_loaded(function, tmp_path)
        assert KEYS.function(shipment.reference) in shipment.objects
        assert found(5) == want


PROGRAM = """
    import asyncio, sys
    from pathlib import Path
    from ephemeron.communication.channels.object_store import ObjectsChannel
    from ephemeron.communication.channels.run_channel import RunChannel
    from ephemeron.communication.signing import SigningKey
    from ephemeron.executor.shipping import Shipper
    from ephemeron.functions.shipped_code import CodeKeys
    from helpers import units
    from helpers.units import twice

    def local(x):
        return twice(x) + 1

    async def main():
        channel = RunChannel(ObjectsChannel.folder(sys.argv[1]), owner="c", signing=SigningKey.from_text(sys.argv[2]), signs=lambda key: True)
        for function in (twice, local, units.Scale(4)):
            shipment = Shipper(CodeKeys("run.code")).ship(function)
            for key, data in shipment.objects.items():
                await channel.put(key, [data])
            print(shipment.reference, shipment.name)

    asyncio.run(main())
"""


def test_code_of_a_program_is_found_where_the_program_is_not(tmp_path):
    """By a process that has neither the program's files nor its folder."""
    folder, store = tmp_path / "program", tmp_path / "objects"
    (folder / "helpers").mkdir(parents=True)
    (folder / "helpers" / "__init__.py").write_text("")
    (folder / "helpers" / "units.py").write_text(
        "def twice(x):\n    return 2 * x\n\nclass Scale:\n    def __init__(self, k):\n        self.k = k\n\n"
        "    def __call__(self, x):\n        return self.k * x\n"
    )
    (folder / "main.py").write_text(textwrap.dedent(PROGRAM))
    out = subprocess.run([sys.executable, "main.py", str(store), KEY.text], cwd=folder, capture_output=True, text=True, check=True).stdout
    references = [line.split() for line in out.splitlines()]
    assert [name for _, name in references] == ["helpers.units.twice", "local", "helpers.units.Scale"]
    for path in (folder / "helpers").iterdir():
        if path.is_file():
            path.unlink()
    reader = """
        import asyncio, sys
        from pathlib import Path
        from ephemeron.communication.channels.object_store import ObjectsChannel
        from ephemeron.communication.channels.run_channel import RunChannel
        from ephemeron.communication.signing import SigningKey
        from ephemeron.functions.shipped_code import CodeKeys, CodeLoader

        async def main():
            channel = RunChannel(ObjectsChannel.folder(sys.argv[1]), owner="f", signing=SigningKey.from_text(sys.argv[2]), signs=lambda key: True)
            loader = CodeLoader(channel, CodeKeys("run.code"), scratch=Path(sys.argv[3]))
            print([(await loader.load(r))(10) for r in sys.argv[4:]])

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(reader), str(store), KEY.text, str(tmp_path / "scratch")]
    ran = subprocess.run(
        [*command, *(r for r, _ in references)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert ran.stdout.strip() == "[20, 21, 40]"


def test_a_replaced_function_is_refused_before_it_is_unpickled(tmp_path):
    tripwire = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tripwire,))

    async def go():
        store = MemoryChannel()
        shipment = Shipper(KEYS).ship(lambda: 1)
        key = KEYS.function(shipment.reference)
        header, _ = decode_function(shipment.objects[key], key=key)
        evil = encode_function(header, pickle.dumps(Evil()))
        await store.put(key, sealed([evil], key=key))
        with pytest.raises(SignatureRefused, match="not signed"):
            await CodeLoader(signed(store), KEYS, scratch=tmp_path).load(shipment.reference)

    asyncio.run(go())
    assert not tripwire.exists()


def test_what_cannot_be_sent_is_refused_by_name(tmp_path):
    handle = (tmp_path / "open").open("w")
    with handle, pytest.raises(JobError, match=r"function .*lambda.* cannot be sent to a function: .*; open files"):
        Shipper(KEYS).ship(lambda: handle.write("x"))
    with pytest.raises(JobError, match="cannot be called"):
        Shipper(KEYS).ship(3)
    with pytest.raises(JobError, match="has no name 'nothing'"):
        Shipper(KEYS).ship("math:nothing")
    with pytest.raises(JobError, match="no module 'nowhere_at_all'"):
        Shipper(KEYS).ship("nowhere_at_all:f")


def test_a_folder_that_is_too_large_is_named(tmp_path, monkeypatch):
    (tmp_path / "in_a_large_folder.py").write_text("def f():\n    pass\n")
    (tmp_path / "data.bin").write_bytes(bytes(21_000_000))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        JobError, match=r"in_a_large_folder\.f needs modules of .*: code has 21\.0 MB.*; keep data elsewhere, or leave it out"
    ):
        Shipper(KEYS).ship("in_a_large_folder:f")


def test_another_version_of_python_is_named(tmp_path):
    async def go():
        channel = signed(MemoryChannel())
        header = ShippedHeader(name="f", python="2.7")
        await channel.put(KEYS.function("abc"), [encode_function(header, b"")])
        await CodeLoader(channel, KEYS, scratch=tmp_path).load("abc")

    with pytest.raises(JobError, match=r"f was pickled by Python 2\.7, and functions have Python 3"):
        asyncio.run(go())


def test_damaged_headers_are_no_functions():
    for data in (b"", b"\x09\0\0\0{}", b"\x02\0\0\0[]"):
        with pytest.raises(CorruptMessage, match="no shipped function"):
            decode_function(data, key="k")


@pytest.mark.parametrize("value", [1, "a", b"b", None, (1, [2.0, {"a": True}]), {1: "x"}, np.arange(3.0), (np.float32(1.5), {"s"})])
def test_values_come_back(value):
    again = unpickled(dumps(value, what="argument"))
    assert type(again) is type(value)
    assert np.all(again == value)
