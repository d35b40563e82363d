"""Random numbers that depend on seed, epoch and sample alone, in every process and in any order.

User code draws from the global generators of `random`, `numpy.random` and `torch`, or from generators of its own that it holds in a
dataset, in a transform or in its module. Loader processes are forked from one image, so they would all draw the same numbers. Before
user code runs for a sample, every generator in reach is therefore seeded from `sample_seed`, and afterwards the caller's states are
restored, so that the trainer's own draws are unaffected.

Seeding costs about 8 µs per call (5 for `random`, 1 for NumPy, 1 for torch); keeping and restoring states costs 75 µs,
mostly for NumPy's, and is done once for all samples of a batch (`kept`), and not at all in loader processes.

Limitation: draws from the operating system (`default_rng()` without a seed inside `__getitem__`, `secrets`, `uuid4`) or from the
clock cannot be seeded.
"""

from __future__ import annotations

import inspect
import os
import random
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import xxhash

_WORD = 2**64
_SAMPLE, _STAGE, _BATCH = struct.Struct("<4sQQQ"), struct.Struct("<4sQQ"), struct.Struct("<4sQQ")
_MOST_VISITED = 10_000
_LONGEST = 1_000
"""Length from which on lists and dicts are taken for samples, not transforms."""
_KINDS = (random.Random, np.random.Generator, np.random.RandomState)
_NO_HOLDERS = (str, bytes, int, float, complex, np.ndarray, ModuleType)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Seed of a sample's random numbers: 64 bits, well mixed, equal for equal arguments on every machine."""
    return xxhash.xxh3_64_intdigest(_SAMPLE.pack(b"smpl", int(seed) % _WORD, int(epoch) % _WORD, int(index) % _WORD))


def stage_seed(sample: int, stage: int) -> int:
    """Seed of one stage of a sample, from the sample's seed: stages draw independently of each other."""
    return xxhash.xxh3_64_intdigest(_STAGE.pack(b"stag", sample, stage % _WORD))


def batch_seed(seed: int, epoch: int, indices: Sequence[int]) -> int:
    """Seed of collating a batch: it depends on the samples in it, not on the number of the batch."""
    head = _BATCH.pack(b"btch", int(seed) % _WORD, int(epoch) % _WORD)
    return xxhash.xxh3_64_intdigest(head + np.asarray(indices, dtype="<i8").tobytes())


def seed_everything(seed: int, held: Sequence[Any] = ()) -> None:
    """Seeds the global generators of those libraries that are imported, and further ones.

    Args:
        seed: any integer of 64 bits.
        held: generators that user code holds, from `generators_in`.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which looks for devices; and another thread may just be importing it.
    generator: Any = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.manual_seed(seed % 2**63)
    for number, each in enumerate(held):
        _reseed(each, stage_seed(seed, number))


@contextmanager
def seeded(seed: int, epoch: int, index: int, *, stage: int | None = None) -> Iterator[None]:
    """The global generators seeded for a sample; afterwards they are as they were.

    Args:
        seed: of the job.
        epoch: of the job.
        index: of the sample in its dataset.
        stage: of the sample's processing; None: the sample as a whole.
    """
    with kept():
        own = sample_seed(seed, epoch, index)
        seed_everything(own if stage is None else stage_seed(own, stage))
        yield


# -- the caller's own states --------------------------------------------------------------------------------


class _Keeping:
    """Ownership of the process's generators by `kept`."""

    def __init__(self) -> None:
        self.others_draw = True
        """False in loader processes."""
        self.reset()

    def reset(self) -> None:
        """Initial state, also of a forked child, whose only thread owns nothing."""
        self.lock = threading.RLock()
        self.depth = 0
        self.held: set[int] = set()
        """Identities of further generators that are kept."""


_KEEPING = _Keeping()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_KEEPING.reset)


def mark_loader_process() -> None:
    """Declares that this is a loader process: the states of generators need not be kept."""
    _KEEPING.others_draw = False


def reseed_from_system(held: Sequence[Any] = ()) -> None:
    """Seeds all generators from the operating system in a loader process, so that draws do not repeat. Elsewhere: nothing."""
    if not _KEEPING.others_draw:
        seed_everything(int.from_bytes(os.urandom(8), "little"), held)


@contextmanager
def kept(held: Sequence[Any] = ()) -> Iterator[None]:
    """Restores the caller's generators at the end. May be nested: each state is restored by the outermost context that has it.

    The generators belong to the process, so one thread at a time is inside. Threads that draw from them outside disturb the seeds set
    here: seed only where the process's other threads do not draw.

    Args:
        held: further generators.
    """
    with _KEEPING.lock:
        outermost = _KEEPING.depth == 0
        _KEEPING.depth += 1
        try:
            if not _KEEPING.others_draw:
                yield
                return
            mine = [each for each in held if id(each) not in _KEEPING.held]
            restore = [*(_global_states() if outermost else ()), *(_state_of(each) for each in mine)]
            _KEEPING.held.update(map(id, mine))
            try:
                yield
            finally:
                _KEEPING.held.difference_update(map(id, mine))
                for put_back in restore:
                    put_back()
        finally:
            _KEEPING.depth -= 1


def _global_states() -> list[Callable[[], None]]:
    out: list[Callable[[], None]] = [partial(random.setstate, random.getstate()), partial(np.random.set_state, np.random.get_state())]
    generator: Any = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        out.append(partial(generator.set_state, generator.get_state()))
    return out


class Watch:
    """Detects whether any generator in reach was drawn from since `begin`.

    Args:
        held: generators beyond the global ones.
    """

    def __init__(self, held: Sequence[Any] = ()) -> None:
        self._held = tuple(held)
        self._before: list[Any] = []

    def begin(self) -> None:
        """Stores all states, in about 40 µs."""
        self._before = self._states()

    def drew(self) -> bool:
        """Whether a state has changed."""
        return self._states() != self._before

    def _states(self) -> list[Any]:
        _, words, *rest = np.random.get_state(legacy=True)
        out: list[Any] = [random.getstate(), (np.asarray(words).tobytes(), *rest)]
        generator: Any = getattr(sys.modules.get("torch"), "default_generator", None)
        out.append(None if generator is None else generator.get_state().numpy().tobytes())
        return out + [words_of(each) for each in self._held]


# -- generators that user code holds ------------------------------------------------------------------------


def generators_in(*things: Any) -> tuple[Any, ...]:
    """Generators that datasets, transforms and functions hold, in an order that is the same in every process.

    Searches attributes, lists, dicts, closures, bound arguments, and the modules of functions. The global generators of the
    libraries (`random`, `numpy.random.mtrand`, `torch.default_generator`) are not included.
    """
    found: dict[int, Any] = {}
    todo, seen, kinds = deque(things), set[int](), set[type]()
    shared = {id(each) for each in _library_generators()}
    while todo and len(seen) < _MOST_VISITED:
        thing = todo.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if _is_generator(thing):
            if id(thing) not in shared:
                found[id(thing)] = thing
            continue
        if len(todo) < _MOST_VISITED:
            todo.extend(each for each in _within(thing, kinds) if each is not None and not isinstance(each, _NO_HOLDERS))
    return tuple(found.values())


def _within(thing: Any, kinds: set[type]) -> Iterable[Any]:
    """What a thing holds; what the methods of a class name is left out for `kinds`, to which its classes are added."""
    if isinstance(thing, list | tuple | dict):
        if len(thing) > _LONGEST:
            return ()
        return thing.values() if isinstance(thing, dict) else thing
    if isinstance(thing, partial):
        return (thing.func, thing.args, thing.keywords)
    if isinstance(thing, MethodType):
        return (thing.__func__, thing.__self__)
    if isinstance(thing, FunctionType):
        closed = []
        for cell in thing.__closure__ or ():
            try:
                closed.append(cell.cell_contents)
            except ValueError:  # it is not bound yet
                continue
        return (*closed, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), *_named_by(thing))
    if isinstance(thing, type):
        return ()
    attributes = getattr(thing, "__dict__", None)
    # A model has hundreds of modules of few classes; PyTorch's own have hundreds of methods, which name no generator but its global one.
    new = [kind for kind in type(thing).__mro__[:-1] if kind not in kinds]
    kinds.update(new)
    own = [kind for kind in new if kind.__module__.partition(".")[0] != "torch"]
    methods = [f for kind in own for f in vars(kind).values() if isinstance(f, FunctionType)]
    return (*(attributes.values() if isinstance(attributes, dict) else ()), *(g for f in methods for g in _named_by(f)))


def _named_by(function: FunctionType) -> Iterator[Any]:
    """Generators of a function's module that its code names."""
    for name in function.__code__.co_names:
        thing = function.__globals__.get(name)
        if thing is not None and _is_generator(thing):
            yield thing


def _library_generators() -> Iterator[Any]:
    yield getattr(random, "_inst", None)
    yield getattr(np.random.mtrand, "_rand", None)
    yield getattr(sys.modules.get("torch"), "default_generator", None)


def _is_generator(thing: Any) -> bool:
    if isinstance(thing, _KINDS):
        return not isinstance(thing, random.SystemRandom)
    kind = getattr(sys.modules.get("torch"), "Generator", None)
    return kind in type(thing).__mro__ and thing.device.type == "cpu"  # `isinstance` would ask a slow metaclass


def _reseed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        generator.manual_seed(seed % 2**63)


def generator_state(generator: Any) -> Any:
    """State of a generator, as plain values, arrays and tensors."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Restores what `generator_state` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _state_of(generator: Any) -> Callable[[], None]:
    return partial(set_generator_state, generator, generator_state(generator))


def words_of(generator: Any) -> Any:
    """State of a generator as a value that can be compared."""
    if isinstance(generator, np.random.Generator):
        return _words(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _words(generator.get_state(legacy=False))
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state().numpy().tobytes()


def _words(state: Any) -> Any:
    """A state of NumPy's without arrays, which cannot be compared as a whole."""
    if isinstance(state, dict):
        return {name: _words(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


# -- generators as arguments -------------------------------------------------------------------------------


def generator_parameter(function: Callable[..., Any]) -> str | None:
    """The parameter by which a function takes a generator of its own.

    `rng` gets a `numpy.random.Generator`, `generator` a `torch.Generator`; None: it takes none.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins
        return None
    bound = function.keywords if isinstance(function, partial) else {}
    for name in ("rng", "generator"):
        if name in parameters and name not in bound and parameters[name].kind in _BY_NAME:
            return name
    return None


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def generator_argument(name: str, seed: int) -> dict[str, object]:
    """The generator argument of a function (`generator_parameter`)."""
    if name == "rng":
        return {name: np.random.default_rng(seed)}
    import torch

    return {name: torch.Generator().manual_seed(seed % 2**63)}
