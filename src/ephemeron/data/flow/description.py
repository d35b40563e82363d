"""Description of a flow: dataset, map steps and cacheable prefix, as a value (DPFlow, definition 3.2 and table 3-1).

A description is independent of where it is read. It is immutable: a method that adds a step returns another
description, and descriptions with a common beginning do not affect each other. Name and version identify the content:
increment the version when a step changes, because services keep results under it.

Data and target of a sample of any shape: a tuple, a list, a dict, a dataclass, or a single value.

| sample | data | target | with `key` |
|---|---|---|---|
| tuple, list, named tuple | its first part | its last part, of at least two | a place, or a field's name |
| dataclass | its first field | its last field, of at least two | a field's name |
| mapping | only with `key` | only with `key` | a key |
| anything else (array, tensor, text, image) | all of it | none | none |

The other parts of a sample are unchanged, and the sample keeps its type.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, TypeAlias

from ephemeron.config.paths import AnyPath, located
from ephemeron.data.sources.adapters import as_dataset, is_place
from ephemeron.errors import JobError

CacheControl: TypeAlias = Literal["can-cache", "no-cache"]
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class SampleAdapter(Protocol):
    """The part of a sample that a step's function maps, and how its result changes the sample."""

    def process_arg(self, arg: Any) -> Any:
        """The function's argument, from the sample."""

    def process_ret(self, arg: Any, ret: Any) -> Any:
        """The new sample, from the old one and the result of the function."""


@dataclass(frozen=True, slots=True)
class MapData:
    """The function maps the data; the rest stays. `parts` defines the data of a sample."""

    key: Key = None
    """The part by name or number; None: the first one."""

    def process_arg(self, arg: Any) -> Any:
        return part_of(arg, "data", self.key)

    def process_ret(self, arg: Any, ret: Any) -> Any:
        return with_part(arg, "data", self.key, ret)


@dataclass(frozen=True, slots=True)
class MapTarget:
    """The function maps the target; the rest stays. `parts` defines the target of a sample."""

    key: Key = None
    """The part by name or number; None: the last one."""

    def process_arg(self, arg: Any) -> Any:
        return part_of(arg, "target", self.key)

    def process_ret(self, arg: Any, ret: Any) -> Any:
        return with_part(arg, "target", self.key, ret)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapStep:
    """One map stage."""

    name: str
    function: Callable[[Any], Any]
    transform: SampleAdapter | None = None
    """Selects the part that the function maps; None: whole samples."""
    cache: CacheControl = "no-cache"
    """`can-cache`: the result after this step is the same in every epoch and for every job, and may be kept."""

    def apply(self, sample: Any) -> Any:
        """The sample after this step."""
        if self.transform is None:
            return self.function(sample)
        return self.transform.process_ret(sample, self.function(self.transform.process_arg(sample)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSource:
    """The source of samples: a dataset of a store, or any map-style dataset of this process."""

    name: str = ""
    """`namespace/name` in the store."""
    version: str = "latest"
    variant: str = ""
    store: str | None = None
    """URL; None: the store in the home folder."""
    dataset: Any = None
    """A dataset in place of all these: an object with `__len__` and `__getitem__` that yields samples."""
    decode: bool = True
    """Whether data is decoded; False: it comes as it is stored, and a step decodes it."""

    def __str__(self) -> str:
        if self.dataset is not None:
            return type(self.dataset).__name__
        return f"{self.name}@{self.version}:{self.variant}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FlowDescription:
    """Dataset, steps, cacheable prefix. Immutable: `dataset`, `map` and the others return a new one and can be chained.

    Args:
        name: `namespace/name`.
        version: version of its steps, from 1.
        source: source of the samples; see `dataset`.
        steps: map steps, in order; see `map`.

    Raises:
        JobError: the name or the version is malformed.
    """

    name: str
    version: int = 1
    source: FlowSource | None = None
    steps: tuple[MapStep, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise JobError(f"flow {self.name!r}: a name has two parts", remedy="write namespace/name")
        if isinstance(self.version, bool) or not isinstance(self.version, int) or self.version < 1:
            raise JobError(f"flow {self.name}: version {self.version!r} should be a whole number from 1")

    def __repr__(self) -> str:
        steps = " → ".join([str(self.source), *(s.name for s in self.steps)])
        return f"Flow({self.name!r}, version={self.version}: {steps})"

    def dataset(
        self,
        name: Any,
        version: str = "latest",
        variant: str = "train",
        *,
        store: AnyPath | None = None,
        decode: bool = True,
        target: str | None = None,
    ) -> Self:
        """The flow with another dataset.

        Args:
            name: of a dataset in a store, `namespace/name`; or data: a map-style dataset, of samples of any shape, a table, arrays,
                or files (docs/flows.md).
            version: its version, or `latest`, which is resolved when reading begins.
            variant: e.g. `train`.
            store: folder or URL of the store; None: the store of the home folder.
            decode: False to leave data undecoded, if decoding is one of the steps.
            target: of a table or a file of rows: the column that becomes the second part of each sample.

        Raises:
            JobError: `name` is neither a name nor data, or there is no such column.
        """
        if isinstance(name, str) and not is_place(name):
            source = FlowSource(name=name, version=version, variant=variant, store=None if store is None else located(store), decode=decode)
        else:
            source = FlowSource(dataset=as_dataset(name, f"flow {self.name}", target=target))
        return replace(self, source=source)

    def map(
        self, name: str, function: Callable[[Any], Any], *, transform: SampleAdapter | None = None, cache_control: CacheControl = "no-cache"
    ) -> Self:
        """The flow with one more step.

        Args:
            name: of the step, unique in the flow; used in errors and counters.
            function: one argument, and perhaps `rng` (a `numpy.random.Generator`) or `generator` (a `torch.Generator`).
                All generators that it may draw from are seeded for every sample and step, so the result does not depend
                on which process computes it.
            transform: selects the part of a sample that it maps; None: the whole sample.
            cache_control: `can-cache` if the sample after this step is the same in every epoch.

        Raises:
            JobError: the name is used already, the function is not callable, or the cache control is unknown.
        """
        if not callable(function):
            raise JobError(f"flow {self.name}: step {name!r} is not a function but {function!r}")
        if any(s.name == name for s in self.steps):
            raise JobError(f"flow {self.name}: there is a step {name!r} already", remedy="give steps different names")
        if cache_control not in ("can-cache", "no-cache"):
            raise JobError(f"flow {self.name}, step {name!r}: cache_control = {cache_control!r}", remedy="use can-cache or no-cache")
        step = MapStep(name=name, function=function, transform=transform, cache=cache_control)
        return replace(self, steps=(*self.steps, step))

    def map_data(self, name: str, function: Callable[[Any], Any], *, key: Key = None, cache_control: CacheControl = "no-cache") -> Self:
        """A step that maps the data: the first part of a sample, or the one that `key` names. See `map` and `parts`."""
        return self.map(name, function, transform=MapData(key), cache_control=cache_control)

    def map_target(self, name: str, function: Callable[[Any], Any], *, key: Key = None, cache_control: CacheControl = "no-cache") -> Self:
        """A step that maps the target: the last part of a sample, or the one that `key` names. See `map` and `parts`."""
        return self.map(name, function, transform=MapTarget(key), cache_control=cache_control)

    def clone(self, *, name: str | None = None, version: int | None = None) -> Self:
        """A description with the same source and steps under another name or version."""
        return replace(self, name=name or self.name, version=version or self.version)

    @property
    def cached_steps(self) -> int:
        """Number of steps at the beginning whose result may be cached: those up to the last `can-cache`."""
        return max((i + 1 for i, s in enumerate(self.steps) if s.cache == "can-cache"), default=0)


# -- data and target of a sample of any shape ---------------------------------------------------------------------


Key: TypeAlias = str | int | None
Role: TypeAlias = Literal["data", "target"]


def part_of(sample: Any, role: Role, key: Key) -> Any:
    """The data or the target of a sample, or the part that `key` names.

    Raises:
        ValueError: the sample has no such part; the message lists its parts.
    """
    place = _place(sample, role, key)
    if place is None:
        return sample
    return getattr(sample, place) if _has_fields(sample) and isinstance(place, str) else sample[place]


def with_part(sample: Any, role: Role, key: Key, value: Any) -> Any:
    """A copy of the sample with another value for that role or key; the given sample is unchanged.

    Raises:
        ValueError: the sample has no such part.
    """
    place = _place(sample, role, key)
    if place is None:
        return value
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        return dataclasses.replace(sample, **{str(place): value})
    if isinstance(sample, tuple):
        named: Any = sample
        parts = list(sample)
        parts[named._fields.index(place) if isinstance(place, str) else place] = value
        return named._make(parts) if hasattr(named, "_make") else tuple(parts)
    other: Any = copy.copy(sample)
    other[place] = value
    return other


def _place(sample: Any, role: Role, key: Key) -> Any:
    """Place of the part; None: it is the whole sample."""
    if isinstance(sample, Mapping):
        return _key_of(sample, role, key)
    if dataclasses.is_dataclass(sample):
        return _field_of(sample, [field.name for field in dataclasses.fields(sample)], role, key)
    if isinstance(sample, tuple | list):
        names = list(getattr(sample, "_fields", ()))
        if isinstance(key, str):
            return _field_of(sample, names, role, key)
        return _number_of(sample, role, key)
    if key is not None or role == "target":
        what = "target" if key is None else f"part {key!r}"
        raise ValueError(f"the sample is a single {type(sample).__name__} and has no {what}: map it whole with map or map_data")
    return None


def _key_of(sample: Mapping[Any, Any], role: Role, key: Key) -> Any:
    keys = ", ".join(map(repr, sample))
    if key is None:
        raise ValueError(f"the sample is a {type(sample).__name__} with the keys {keys}: say which with map_{role}(..., key=...)")
    if key not in sample:
        raise ValueError(f"the sample has no key {key!r} but {keys}")
    return key


def _field_of(sample: Any, names: list[str], role: Role, key: Key) -> str:
    if key is None:
        _enough(len(names), sample, role)
        return names[0 if role == "data" else -1]
    if key not in names:
        raise ValueError(f"the sample, a {type(sample).__name__}, has no field {key!r} but {', '.join(names) or 'none'}")
    return str(key)


def _number_of(sample: Any, role: Role, key: int | None) -> int:
    if key is None:
        _enough(len(sample), sample, role)
        return 0 if role == "data" else len(sample) - 1
    if not -len(sample) <= key < len(sample):
        raise ValueError(f"the sample, a {type(sample).__name__} of {len(sample)}, has no part {key}")
    return key % len(sample)


def _enough(parts: int, sample: Any, role: Role) -> None:
    if parts < (1 if role == "data" else 2):
        raise ValueError(f"the sample, a {type(sample).__name__} of {parts}, has no {role}")


def _has_fields(sample: Any) -> bool:
    return dataclasses.is_dataclass(sample) or hasattr(sample, "_fields")
