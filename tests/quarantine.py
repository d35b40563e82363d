"""The tests that may be tried a second time, from `quarantine.toml`, which says what an entry consists of.

Everywhere else a test that fails once fails the lane. `test_quarantined_tests.py` keeps the list from going stale; `make test-nightly` runs
each of its tests 20 times.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "quarantine.toml"
MOST_DAYS = 30
"""An entry that is older fails the fast lane."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A test that may be tried a second time."""

    test: str
    """As pytest names it; without parameters it stands for all of them."""
    reason: str
    date: datetime.date
    """Since when it is in the list."""
    owner: str
    """Module of the package that is suspected."""

    def problems(self, today: datetime.date, root: Path = ROOT) -> list[str]:
        """What is wrong with the entry."""
        path, _, name = self.test.partition("::")
        found = []
        if not name or not (root / path).is_file() or not _is_in(name, (root / path).read_text(), root):
            found.append("there is no such test")
        if not self.reason.strip():
            found.append("it has no reason")
        if (age := (today - self.date).days) > MOST_DAYS:
            found.append(f"it is {age} days old: mend it (most: {MOST_DAYS})")
        if age < 0:
            found.append(f"{self.date} is not here yet")
        module = root / "src" / self.owner.replace(".", "/")
        if not self.owner.startswith("ephemeron") or not (module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()):
            found.append(f"owner: there is no module {self.owner}")
        return [f"{self.test}: {each}" for each in found]


def quarantined(path: Path = LIST) -> dict[str, Entry]:
    """The list, by `test`.

    Raises:
        ValueError: an entry is not as it has to be; the message names it.
    """
    entries: dict[str, Entry] = {}
    names = {field.name for field in fields(Entry)}
    for n, said in enumerate(tomllib.loads(path.read_text()).get("test", []), 1):
        where = f"{path.name}, entry {n} ({said.get('test', 'without a test')})"
        if missing := names - said.keys():
            raise ValueError(f"{where}: {', '.join(sorted(missing))} is missing")
        if unknown := said.keys() - names:
            raise ValueError(f"{where}: {', '.join(sorted(unknown))} is not a field of an entry")
        if type(said["date"]) is not datetime.date:
            raise ValueError(f"{where}: date has to be a date such as 2026-11-28, without quotation marks")
        if wrong := [name for name in names - {"date"} if not isinstance(said[name], str)]:
            raise ValueError(f"{where}: {', '.join(sorted(wrong))} has to be a string")
        if said["test"] in entries:
            raise ValueError(f"{where}: it is in the list twice")
        entries[said["test"]] = Entry(**said)
    return entries


def entry_of(nodeid: str, entries: Mapping[str, Entry]) -> Entry | None:
    """The entry of a test: its own, or that of all its parameters."""
    return entries.get(nodeid) or entries.get(nodeid.partition("[")[0])


def _is_in(name: str, module: str, root: Path) -> bool:
    """Whether a module has a test, of its own or inherited from a kit by one of its classes."""
    *classes, function = name.partition("[")[0].split("::")
    defined = re.compile(rf"def {re.escape(function)}\(")
    if any(f"class {each}" not in module for each in classes):
        return False
    kits = [*(root / "src/ephemeron/testing").rglob("*.py"), *(root / "tests").rglob("*.py")] if classes else []
    return bool(defined.search(module)) or any(defined.search(kit.read_text()) for kit in kits)
