"""Models by group, where `fit_groups` has stored them.

    fit.json                 which groups and which version of the function the models are of
    index/, rows/            the table of results: a row per model, with metrics as JSON, and small models
    models/DIGEST.pickle     larger ones

A pickle executes what it says, so models are read only from where the user says they are, and after their digest was checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.config.typed import build, plain
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import JobError, UserError
from ephemeron.maps.frames import Frame
from ephemeron.maps.groups.calls import digest_of_model, verified_model
from ephemeron.maps.groups.grouping import Grouping, KeptColumn, read_keys
from ephemeron.maps.groups.keys import match_key, text_of
from ephemeron.maps.groups.source import ids_of
from ephemeron.maps.groups.table_data import EXTRA
from ephemeron.maps.objects import Objects
from ephemeron.maps.outputs import table_place
from ephemeron.maps.result_table import ResultTable
from ephemeron.user_code import line_of, unpickled

INLINE_BYTES = 64 << 10
"""Largest model in the table. Tasks are sent with it, and thousands of them wait in the client's memory."""
_FIT = "fit.json"
MODELS = "models/"
"""Beginning of the names of larger models."""
_FORMAT = 1
_TAKEN = 1000
"""Rows that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFit:
    """What the models of a folder are of."""

    format: int = _FORMAT
    function: str
    """`module:function`."""
    code: str
    """Version of the function; empty: any."""
    by: tuple[str, ...]
    kinds: tuple[str, ...]
    """What the values of each by-column are."""
    columns: tuple[KeptColumn, ...]
    frame: Frame
    grouping: str
    """Name of the groups."""


def read_fit(objects: Objects) -> GroupFit | None:
    """What the models are of; None: there are none.

    Raises:
        JobError: it cannot be read.
    """
    data = objects.fetch(_FIT)
    if data is None:
        return None
    try:
        raw = json.loads(data)
    except ValueError:
        raise JobError(f"{objects.place(_FIT)} is damaged", remedy="fit the groups again") from None
    if isinstance(raw, dict) and raw.get("format", 0) > _FORMAT:
        raise JobError(f"{objects.place(_FIT)} is of a later release", remedy="update ephemeron")
    return build(GroupFit, raw, where=objects.place(_FIT))


def write_fit(objects: Objects, fit: GroupFit) -> None:
    """Says what the models are of."""
    objects.put(_FIT, json.dumps(plain(fit)).encode())


class ModelObjects:
    """Where models go: small ones into the table. See `outputs.ItemObjects`.

    Args:
        objects: beside the table.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def stored(self, key: str, text: str | None, data: bytes | None) -> tuple[str | None, bytes | None]:
        """Stores a model; returns what is recorded."""
        if text is None or data is None or len(data) <= INLINE_BYTES:
            return text, data
        about = json.loads(text)
        about["object"] = f"{MODELS}{about['digest']}.pickle"
        self._objects.put(about["object"], data)
        return json.dumps(about), None


class GroupModels:
    """The models of a folder. Iterating gives their keys, as JSON such as `["Berlin",17]`.

    Args:
        objects: in the folder.
        fit: what they are of.
        grouping: their groups.
    """

    def __init__(self, objects: Objects, fit: GroupFit, grouping: Grouping) -> None:
        self.objects, self.fit, self.by = objects, fit, fit.by
        self.table = ResultTable.open(objects.address)
        keys: list[str] = grouping.index.column("key").to_pylist()
        self._known = frozenset(keys)
        rows, failed = self.table.known(code=fit.code or None).find(ids_of(grouping))
        self._failed = {key: int(row) for key, row, bad in zip(keys, rows.tolist(), failed.tolist(), strict=True) if bad}
        self._places = {key: int(row) for key, row in zip(keys, np.where(failed, -1, rows).tolist(), strict=True) if row >= 0}

    @classmethod
    def open(cls, place: str | Path) -> GroupModels:
        """The models of a folder or a prefix of a bucket.

        Args:
            place: as `out` of `fit_groups`.

        Raises:
            JobError: there are none.
            DamagedObject: what says which they are is damaged.
        """
        pyarrow(EXTRA)
        address = table_place(f"{str(place).rstrip('/')}/", "")
        objects = Objects(address)
        there = not objects.is_local or Path(objects.place("")).is_dir()  # looking makes no folder
        fit = read_fit(objects) if there else None
        if fit is None:
            raise JobError(
                f"there are no models in {place}", remedy=f"run: ephemeron fit-groups DATA --by COLUMN --fit MODULE:FUNCTION --out {place}"
            )
        manifest, index = read_keys(objects, fit.grouping)
        return cls(objects, fit, Grouping(manifest, index, objects))

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, key: object) -> bool:
        return self._key(key) in self._places

    def __getitem__(self, key: object) -> Any:
        """The model of a group, unpickled.

        Args:
            key: its key as JSON; or the values of the by-columns, as a tuple, a list, a dict by column or, of one column, the value.

        Raises:
            KeyError: there is no such group, or it has no model; says why.
            DamagedObject: it is damaged; names the group.
            UserError: it cannot be unpickled here.
        """
        text = self._key(key)
        if text in self._failed:
            why = self.table.take([self._failed[text]], ("error",)).column(0)[0].as_py()
            raise KeyError(f"group {text} has no model: {why}")
        if text not in self._places:
            raise KeyError(f"there is no model of group {text} in {self.table.shown}")
        result, data = (column[0].as_py() for column in self.table.take([self._places[text]], ("result", "data")).columns)
        about = json.loads(result)
        place = self.table.shown
        if data is None:
            place, data = self.objects.place(about["object"]), self.objects.fetch(about["object"])
        try:
            return unpickled(verified_model(data, about["digest"], key=text, place=place))
        except (ImportError, AttributeError) as e:
            raise UserError(f"the model of group {text} needs what is not here: {line_of(e)}") from e

    def rows(self) -> Iterator[dict[str, Any]]:
        """What is recorded of each model and of each group that failed: `key` (a list), `rows`, `nbytes`, `metrics`, `error`, `seconds`."""
        places = {**self._places, **self._failed}
        keys = list(places)
        for at in range(0, len(keys), _TAKEN):
            part = keys[at : at + _TAKEN]
            taken = self.table.take([places[key] for key in part], ("result", "error", "seconds")).to_pylist()
            for key, row in zip(part, taken, strict=True):
                about: Mapping[str, Any] = json.loads(row["result"] or "{}")
                yield {
                    "key": json.loads(key),
                    "rows": about.get("rows"),
                    "nbytes": about.get("nbytes"),
                    "metrics": about.get("metrics", {}),
                    "error": row["error"],
                    "seconds": row["seconds"],
                }

    # -- for predictions ---------------------------------------------------------------------------------------

    def recorded(self, keys: Sequence[str]) -> list[dict[str, Any] | None]:
        """What is recorded of the model of each of some groups: `digest`, and `object` where it is none of the table; None: it has none."""
        there = sorted({self._places[key] for key in keys if key in self._places})
        found: dict[int, dict[str, Any]] = {}
        for at in range(0, len(there), _TAKEN):
            part = there[at : at + _TAKEN]
            texts = self.table.take(part, ("result",)).column(0).to_pylist()
            found |= {row: json.loads(text) for row, text in zip(part, texts, strict=True)}
        return [found[self._places[key]] if key in self._places else None for key in keys]

    def sent(self, keys: Sequence[str]) -> list[bytes | str]:
        """Models of some groups, pickled; those that are not in the table by their paths or URLs."""
        taken = self.table.take([self._places[key] for key in keys], ("result", "data")).to_pylist()
        return [self.objects.place(json.loads(row["result"])["object"]) if row["data"] is None else row["data"] for row in taken]

    def fingerprint(self) -> str:
        """Of all models."""
        keys = list(self._places)
        digests = [about["digest"] for about in self.recorded(keys) if about is not None]
        return digest_of_model("\0".join([*keys, *digests]).encode())

    def _key(self, key: object) -> str:
        if isinstance(key, Mapping):
            return text_of([key[name] for name in self.by])
        if isinstance(key, tuple | list):
            return text_of(key)
        if isinstance(key, str):
            return match_key(key, self._known, columns=len(self.by)) or key
        return text_of([key])
