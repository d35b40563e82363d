"""What linear algebra has stored: matrices with their owners, and what programs leave when they fail, or when their client is killed.

What has no owner is found, and removed where no function works on it.

A program runs as long as functions announce themselves at its queue or hold leases of its tasks, or its client waits for it. Leases on
objects carry no time, so a queue on objects is observed for as long as a lease lasts; a cache tells it at once.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from ephemeron.blocking import run as blocking
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import SupportsSizes
from ephemeron.config.paths import home, present
from ephemeron.errors import EphemeronError, JobError
from ephemeron.functions.tasks.open_queue import open_queue
from ephemeron.linalg.execution.claims import CLAIM, COMMAND, TEMPORARY, ProgramClaim, claims_of
from ephemeron.linalg.matrices import lifetimes, tile_store

LEASE_S = 12.0
"""The longest lease that executors give functions: for so long a queue on objects is observed."""
_PROGRAM = re.compile(r"(?P<program>\w+-[0-9a-f]{16})-(?P<part>\w+)/(?P<rest>.+)")
_WHOLE = "matrix.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRemains:
    """What there is of one program."""

    program: str
    """Name and digest of its inputs."""
    temporary: int = 0
    """Temporary tiles."""
    queued: int = 0
    """Objects, or keys, of queues without functions and client: tasks, counters, results, code."""
    unfinished: int = 0
    """Tiles of results that are not whole, or of inputs that a command has stored; a run with the same inputs goes on from them."""
    running: str = ""
    """Why nothing of it may be removed; empty: no function and no client works on it."""
    claims: tuple[ProgramClaim, ...] = ()
    """Of clients."""

    @property
    def are_inputs(self) -> bool:
        """Whether a command has read these from files: there is no program of this name."""
        return _are_inputs(self.program)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to remove."""
        return not (self.temporary or self.queued or self.unfinished or self.claims)


@dataclass(slots=True)
class _Counted:
    temporary: int = 0
    claimed: bool = False
    outputs: dict[str, int] = field(default_factory=dict)
    """Tiles by matrix, of those that are not whole."""
    whole: set[str] = field(default_factory=set)


def clean(
    store: str, program: str | None = None, *, dry_run: bool = True, results: bool = False, lease_s: float = LEASE_S
) -> list[ProgramRemains]:
    """Finds what failed and abandoned programs have left in a store, and removes it where that is asked for.

    Temporary tiles, queues, and on request the tiles of unfinished results. What a program has computed before it failed is lost with its
    temporary tiles in part, and with its unfinished results wholly: the next run computes it again.

    Args:
        store: address of the matrices.
        program: name of one, as in the list; None: all.
        dry_run: remove nothing.
        results: remove unfinished results, too.
        lease_s: seconds for which queues on objects are observed.

    Returns:
        What was found; of programs that run, with the reason in `running`, nothing is removed.

    Raises:
        JobError: there is no such program, or it runs and is to be removed.
        ChannelError: the store does not answer.
    """

    async def main() -> list[ProgramRemains]:
        found = await find_remains(store, program, lease_s=lease_s)
        if not dry_run:
            if program is not None:
                check_abandoned(found)
            await remove_remains(store, [each for each in found if not each.running], results=results)
        return found

    return blocking(lambda interrupts: main())


def check_abandoned(remains: Collection[ProgramRemains]) -> None:
    """Refuses programs that run.

    Raises:
        JobError: names the first, and why it is taken to run.
    """
    for each in remains:
        if each.running:
            raise JobError(f"program {each.program} runs: {each.running}", remedy="end it first")


async def find_remains(store: str, program: str | None = None, *, lease_s: float = LEASE_S) -> list[ProgramRemains]:
    """What there is of programs that have not ended well, running ones included; see `clean`."""
    if tile_store.is_gone(store):
        raise JobError(f"there is no folder {store}", remedy="give the address of the matrices")
    async with tile_store.opened(store) as channel:
        counted: dict[str, _Counted] = {}
        for key in await channel.list("" if program is None else f"{program}-"):
            if (match := _PROGRAM.fullmatch(key)) and program in (None, match["program"]):
                _count(counted.setdefault(match["program"], _Counted()), match)
        if program is not None and program not in counted:
            raise JobError(f"{store} has nothing of program {program!r}", remedy="leave the name out to list all programs")
        begun = {name: c for name, c in counted.items() if c.temporary or c.claimed or c.outputs}
        claims = {name: await claims_of(channel, f"{name}{TEMPORARY}") for name, c in begun.items() if c.claimed}
    queues = {claim.queue: claim for each in claims.values() for claim in each}
    observed = dict(zip(queues, await asyncio.gather(*(_observe(q, lease_s) for q in queues.values())), strict=True))
    found = []
    for name, c in sorted(begun.items()):
        of = claims.get(name, [])
        running = next((why for claim in of if (why := _why_running(claim, observed[claim.queue]))), "")
        found.append(
            ProgramRemains(
                program=name,
                temporary=c.temporary,
                unfinished=sum(c.outputs.values()),
                running=running,
                claims=tuple(of),
                queued=sum(observed[claim.queue].keys for claim in of if _is_unused(claim)),
            )
        )
    return found


async def remove_remains(store: str, remains: Collection[ProgramRemains], *, results: bool) -> None:
    """Removes what was found.

    Args:
        store: address of the matrices.
        remains: of programs that do not run.
        results: remove unfinished results, too.

    Raises:
        JobError: a program has been started since.
    """
    check_abandoned(remains)
    async with tile_store.opened(store) as channel:
        for each in remains:
            if {claim.queue for claim in await claims_of(channel, f"{each.program}{TEMPORARY}")} - {claim.queue for claim in each.claims}:
                raise JobError(f"program {each.program} has been started just now", remedy="end it first")
            for claim in filter(_is_unused, each.claims):
                await _remove_queue(claim)
            if results:
                counted = _Counted()
                for key in await channel.list(f"{each.program}-"):
                    if match := _PROGRAM.fullmatch(key):
                        _count(counted, match)
                for matrix in counted.outputs:
                    await tile_store.delete(channel, f"{each.program}-{matrix}")
            await tile_store.delete(channel, f"{each.program}{TEMPORARY}")  # last: claims name the queues


def _are_inputs(program: str) -> bool:
    return program.startswith(f"{COMMAND}-")


def _count(counted: _Counted, match: re.Match[str]) -> None:
    """Counts one object of a program."""
    part, rest = match["part"], match["rest"]
    if f"-{part}" == TEMPORARY:
        if rest.startswith(CLAIM):
            counted.claimed = True
        else:
            counted.temporary += 1
    elif rest == _WHOLE and _are_inputs(match["program"]):
        counted.outputs.setdefault(part, 0)  # a whole input is of use only to its command
    elif rest == _WHOLE:
        counted.whole.add(part)
        counted.outputs.pop(part, None)
    elif part not in counted.whole:
        counted.outputs[part] = counted.outputs.get(part, 0) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observed:
    """State of a queue."""

    keys: int = 0
    functions: int = 0
    leased: int = 0
    problem: str = ""


async def _observe(claim: ProgramClaim, lease_s: float) -> _Observed:
    """Who is at a queue, observed for as long as a lease lasts where that is needed."""
    if claim.channel == "memory" or (claim.is_here and tile_store.is_gone(claim.channel)):
        return _Observed()
    if claim.channel.startswith("file:") and not claim.is_here:
        return _Observed(problem=f"its queue is on the machine {claim.host}, which only that machine can see")
    adapter = "redis" if claim.channel.startswith("redis") else "objects"
    try:
        async with open_channel(claim.channel) as channel:
            keys = len(await channel.list(f"{claim.queue}."))
            if not keys:
                return _Observed()
            queue = open_queue(channel, claim.queue, owner="observer", adapter=adapter, lease_s=lease_s)  # type: ignore[arg-type]
            depth = await queue.depth()
            if adapter == "objects" and (depth.executors or depth.leased):
                await asyncio.sleep(1.1 * lease_s)
                depth = await queue.depth()
            return _Observed(keys=keys, functions=len(depth.executors), leased=depth.leased)
    except EphemeronError as e:
        return _Observed(problem=f"its queue in {claim.channel} cannot be read: {e}")


def _why_running(claim: ProgramClaim, observed: _Observed) -> str:
    """Why a program is taken to run; empty: it does not."""
    if observed.functions or observed.leased:
        return f"{observed.functions} functions are at queue {claim.queue} and have {observed.leased} tasks"
    if claim.client_lives and not claim.failed:
        return f"process {claim.process} of this machine waits for it"
    return observed.problem


def _is_unused(claim: ProgramClaim) -> bool:
    """Whether the client of a queue has ended, so that nothing else takes tasks from it."""
    return not claim.client_lives and (claim.is_here or not claim.failed)


async def _remove_queue(claim: ProgramClaim) -> None:
    if claim.channel == "memory" or (claim.is_here and tile_store.is_gone(claim.channel)):
        return
    async with open_channel(claim.channel) as channel:
        await channel.delete(await channel.list(f"{claim.queue}."))
        channel.discard_staged(f"{claim.queue}.")


# -- matrices

_NAMES = (
    ("input of a command", re.compile(rf"{COMMAND}-[0-9a-f]{{16}}-.+")),
    ("temporary", re.compile(rf".+{TEMPORARY}")),
    ("unnamed", re.compile(r"matrix-[0-9a-f]{16}")),
    ("unnamed", re.compile(r"sample-[0-9a-f]{16}")),
    ("result", re.compile(r"\w+-[0-9a-f]{16}-\w+")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixOnDisk:
    """What is below one name in a store of matrices."""

    store: str
    """Address."""
    name: str
    kind: str
    """`named` or `kept`: stays until it is deleted; `unnamed`, `result`, `temporary`, `input of a command`: goes with its owner."""
    nbytes: int
    """0 where the store does not tell."""
    objects: int
    """Tiles and descriptions."""
    is_whole: bool
    """Whether all its tiles were stored."""
    owner: int | None
    """Number of the process on this machine that has it; None: none that is known."""
    is_owned: bool
    """Whether that process lives."""
    age_s: float | None
    """Since its first object was stored, in folders; None: not known."""

    @property
    def is_abandoned(self) -> bool:
        """Whether it has no name, and nobody has it."""
        return self.kind not in ("named", "kept") and not self.is_owned


def stored_matrices(store: str | None = None) -> list[MatrixOnDisk]:
    """Everything that linear algebra has in a store, with its owner.

    Args:
        store: address of the matrices; None: the folder of this user.

    Raises:
        ChannelError: the store does not answer.
    """
    address = store or home_store()
    if tile_store.is_gone(address):
        return []
    owners: dict[str, tuple[int, bool]] = {}
    for _, lives, entries in lifetimes.ledgers():
        for each in entries:
            if each.store == address and not owners.get(each.name, (0, False))[1]:
                owners[each.name] = (each.process, lives)

    async def find() -> list[MatrixOnDisk]:
        found = []
        async with open_channel(address) as channel:
            sizes = await channel.sizes("") if isinstance(channel, SupportsSizes) else dict.fromkeys(await channel.list(""), 0)
        below: dict[str, dict[str, int]] = {}
        for key, size in sizes.items():
            name, separator, rest = key.partition("/")
            if separator:
                below.setdefault(name, {})[rest] = size
        async with tile_store.opened(address) as framed:
            for name, objects in sorted(below.items()):
                owner, lives = owners.get(name, (None, False))
                claims = await claims_of(framed, name) if any(each.startswith(CLAIM) for each in objects) else []
                for claim in claims:
                    if claim.client_lives or owner is None:
                        owner, lives = claim.process, claim.client_lives
                kind = next((kind for kind, pattern in _NAMES if pattern.fullmatch(name)), "named")
                found.append(
                    MatrixOnDisk(
                        store=address,
                        name=name,
                        kind="kept" if tile_store.KEPT in objects else kind,
                        nbytes=sum(objects.values()),
                        objects=len(objects),
                        is_whole=_WHOLE in objects,
                        owner=owner,
                        is_owned=lives,
                        age_s=_age_s(address, name),
                    )
                )
        running = {each.name.removesuffix(TEMPORARY) for each in found if each.kind == "temporary" and each.is_owned}
        return [replace(each, is_owned=True) if any(each.name.startswith(f"{program}-") for program in running) else each for each in found]

    return blocking(lambda interrupts: find())


def abandoned_matrices(store: str) -> list[MatrixOnDisk]:
    """Whole results, and matrices without a name, that nobody has. Of a store that others may use, those of processes of this machine alone.

    Args:
        store: address of the matrices.

    Raises:
        ChannelError: the store does not answer.
    """
    return [
        each
        for each in stored_matrices(store)
        if each.is_abandoned
        and (each.kind == "unnamed" or (each.kind == "result" and each.is_whole))
        and (each.owner is not None or store == home_store())
    ]


def remove_matrices(matrices: Iterable[MatrixOnDisk]) -> None:
    """Removes what `stored_matrices` has found, whatever it is; what a living process has is left alone.

    Raises:
        ChannelError: a store does not answer.
    """
    by_store: dict[str, list[str]] = {}
    for each in matrices:
        if not each.is_owned:
            by_store.setdefault(each.store, []).append(each.name)

    async def remove() -> None:
        for store, names in by_store.items():
            async with tile_store.opened(store) as channel:
                for name in names:
                    await tile_store.delete(channel, name)

    blocking(lambda interrupts: remove())


def home_store() -> str:
    """Address of the folder for matrices of this user, which may not be there yet."""
    return (home() / "matrices").resolve().as_uri()


def _age_s(address: str, name: str) -> float | None:
    if not address.startswith("file:"):
        return None
    times = [status.st_mtime for _, status in present(tile_store.folder_of(address).glob(f"{name}/*"))]
    return max(0.0, time.time() - min(times)) if times else None
