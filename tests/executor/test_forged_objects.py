"""What others put into the store in place of code, tasks, arguments and results is refused before it is unpickled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.communication.object_frame import sealed
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import PlatformError, SignatureRefused, TaskFailed
from ephemeron.executor import FunctionExecutor
from ephemeron.functions import simulated
from ephemeron.functions.shipped_code import ShippedHeader, dumps, encode_function, python_version
from ephemeron.functions.tasks.model import TaskResult, TaskSpec
from ephemeron.functions.tasks.packing import pack


class Evil:
    def __init__(self, tripwire: Path) -> None:
        self.tripwire = tripwire

    def __reduce__(self):
        return (Path.touch, (self.tripwire,))


def forged(kind: str, evil: bytes) -> bytes:
    """An object of the right form."""
    if kind == "code":
        return encode_function(ShippedHeader(name="f", python=python_version()), evil)
    if kind == "work":
        return pack([TaskSpec(id="t0", function="call math:sqrt", payload=evil)])
    if kind == "log":
        return pack([TaskResult(id=f"t{n}", data=evil) for n in range(9)])
    return evil


@pytest.mark.parametrize("signature", ["none", "another executor's", "another object's"])
@pytest.mark.parametrize("kind", ["code", "work", "in", "out", "data", "log"])
def test_a_forged_object_is_refused(kind, signature, tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    tripwire = tmp_path / "executed"
    evil = forged(kind, dumps(Evil(tripwire), what="evil"))
    stranger = SigningKey.new()
    hit = []

    class Attacked(MemoryParameterServer):
        """A store into which another principal writes, too. It knows every format, and has no key of the executor."""

        def publish(self, key: str, data) -> None:
            if f".{kind}/" in key and not key.endswith("closed"):
                hit.append(key)
                content = [evil]
                if signature == "another executor's":
                    content = stranger.signed(content, name=key)
                elif signature == "another object's":
                    content = pool._session.key.signed(content, name=f"{key}-elsewhere")
                data = b"".join(map(bytes, sealed(content, key=key)))
            super().publish(key, data)

    monkeypatch.setattr(simulated, "MemoryParameterServer", Attacked)
    big = np.zeros(20_000)
    with FunctionExecutor(platform="simulated", max_workers=2, retries=0) as pool:
        futures = [pool.submit(lambda a: a.sum(), big), pool.submit(np.zeros, 20_000)]
        futures.append(pool.map_reduce(abs, range(20), max, chunksize=2, fan_in=3))
        with pytest.raises((SignatureRefused, PlatformError, TaskFailed), match=r"not signed|signature does not match"):
            [future.result(timeout=60) for future in futures]
    assert hit
    assert not tripwire.exists()
