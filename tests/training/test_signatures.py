"""A run refuses objects that others have written into its channel, before anything of them is executed or decoded."""

from __future__ import annotations

import asyncio
import io
import zipfile
from pathlib import Path

import pytest
from training_runs import configuration, make_job

from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.keys import Keys
from ephemeron.communication.object_frame import opened, sealed
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import RunFailed, SignatureRefused, UserError
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.context import Context, ThreadCompute
from ephemeron.functions.entries import serve
from ephemeron.prices import load_prices
from ephemeron.runs.verbs import resume
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.job import JobLimits, Target
from ephemeron.training.worker.request import WorkerRequest

KEYS = Keys("run")


async def never(*_):
    raise AssertionError("one function finishes the run")


async def function(channel: Channel, key: SigningKey, scratch: Path, *, attempt: int = 0):
    """Runs one function of the run to its end."""
    loop, compute = asyncio.get_running_loop(), ThreadCompute(1)
    call = Call(
        run="run",
        rank=0,
        attempt=attempt,
        memory_mb=1769,
        lifetime_s=300.0,
        channel="folder",
        key=key.text,
        reason="start" if attempt == 0 else "resume",
        request=WorkerRequest().to_json(),
    )
    ctx = Context(
        call=call,
        invocation=f"function-{attempt}",
        channel=channel,
        emit=lambda event: None,
        invoke=never,
        compute=compute,
        origin=loop.time(),
        deadline=loop.time() + 300.0,
        die=never,
        scratch=scratch / str(attempt),
        own_process=False,
    )
    (scratch / str(attempt)).mkdir(parents=True)
    try:
        return await serve(ctx)
    finally:
        compute.close()


def scene(tmp_path: Path, attack, *, attempts: int = 1, **changes):
    """Runs the functions of a prepared run over a folder, with an attack on its objects before the last one starts."""
    job = make_job(**changes)
    c = configuration(workers=1, aggregators=1, batch_size=160, checkpoint_every=2)
    prepared = prepare(job, c, run_id="run", limits=Limits(), prices=load_prices("objects"))
    key = SigningKey.new()

    async def go():
        async with open_channel((tmp_path / "objects").as_uri()) as store:
            mine = RunChannel(store, owner="client", signing=key)
            for name, buffers in prepared.objects.items():
                await mine.put(name, buffers)
            for attempt in range(attempts - 1):
                await function(store, key, tmp_path, attempt=attempt)
            await attack(store)
            return await function(store, key, tmp_path, attempt=attempts - 1)

    return asyncio.run(go())


async def replaced(store: Channel, name: str, content: bytes) -> None:
    """Puts an object as a principal would that knows the format and has no key."""
    await store.put(name, sealed([content], key=name))


def program(tripwire: Path) -> bytes:
    """A bundle whose modules tell when they are executed."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("0/tiny.py", f"open({str(tripwire)!r}, 'w').close()\nraise SystemExit\n")
    return out.getvalue()


def test_an_undisturbed_function_finishes(tmp_path: Path) -> None:
    async def nothing(store: Channel) -> None:
        pass

    assert scene(tmp_path, nothing)["outcome"] == "finished"


@pytest.mark.parametrize("name", [KEYS.spec, KEYS.code, KEYS.init, KEYS.data(0), KEYS.test(0)])
@pytest.mark.parametrize("how", ["changed", "unsigned", "of another run", "swapped"])
def test_a_prepared_object_of_somebody_else_is_refused(tmp_path: Path, name: str, how: str) -> None:
    tripwire = tmp_path / "executed"

    async def attack(store: Channel) -> None:
        stored = bytes(opened(await store.fetch(name), key=name))
        other = KEYS.code if name != KEYS.code else KEYS.spec
        content = {
            "changed": stored[:-1] + bytes([stored[-1] ^ 1]),
            "unsigned": program(tripwire),
            "of another run": b"".join(map(bytes, SigningKey.new().signed([program(tripwire)], name=name))),
            "swapped": bytes(opened(await store.fetch(other), key=other)),
        }[how]
        await replaced(store, name, content)

    with pytest.raises(SignatureRefused, match=f"key {name}"):
        scene(tmp_path, attack)
    assert not tripwire.exists()


def test_a_checkpoint_of_somebody_else_is_refused(tmp_path: Path) -> None:
    async def attack(store: Channel) -> None:
        [state] = await store.list(KEYS.states(0))
        # Under another iteration's name: it was signed with the run's key, as another object.
        await replaced(store, KEYS.state(0, 90), bytes(opened(await store.fetch(state), key=state)))

    with pytest.raises(SignatureRefused, match="key run/state/0/"):
        scene(tmp_path, attack, attempts=2, limits=JobLimits(time_limit_s=0.0001))


@pytest.mark.slow
def test_a_stopped_run_keeps_its_key_to_itself_and_goes_on_with_it(home: Path) -> None:
    job = make_job(limits=JobLimits(budget_usd=1e-7), model=Target(target="tiny:mlp"))
    c = configure(job, workers=2, aggregators=1, batch_size=120, checkpoint_every=1)
    stopped = train(job, c)
    assert stopped.summary.status == "stopped"
    folder = stopped.folder
    key = folder.signing_key()
    files = [p for p in folder.path.rglob("*") if p.is_file() and p.name != "signing.key"]
    assert any(p.name.startswith("state+0") for p in files)
    for path in files:
        content = path.read_bytes()
        assert key.secret not in content, path
        assert key.text.encode() not in content, path
    again = resume(folder.run_id, check=False)
    assert again.summary.status == "stopped", "its functions have read spec, code and checkpoints that it signed"
    name = Keys(folder.run_id).spec
    (folder.objects / name).write_bytes(b"".join(map(bytes, sealed([b"{}"], key=name))))
    with pytest.raises(RunFailed, match="SignatureRefused"):
        resume(folder.run_id)
    (folder.path / "signing.key").unlink()
    with pytest.raises(UserError, match=r"no readable signing\.key"):
        resume(folder.run_id)
