"""The files that a map of partitions writes: one per partition, which readers take as one table. Which of them count is in the table of results beside it.

A file whose result does not count any more, of an earlier version of the function or of a partition that is gone, is deleted before functions begin, so no row is
there twice. Functions write files under a name that the partition and the version of the function determine, so an attempt replaces the one before.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import JobError, UserError
from ephemeron.maps.objects import Objects
from ephemeron.maps.partitions.source import NAME, partition_of

_UNFINISHED = re.compile(rf"\.{NAME.pattern}\.[0-9a-f]{{12}}\.part")
"""What a function that was killed while it wrote leaves on this machine."""


class PartitionFiles:
    """Files in a folder or below a prefix, and the schema that all have. It is that of the first result; columns that are null alone, and have no type, get
    one when the others are known. See `outputs.ItemObjects`.

    Args:
        objects: the folder.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.schema: Any = None
        """`pyarrow.Schema`; None: there is no result yet."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its name; of a folder that is not there: none."""
        if self.objects.is_local and not Path(self.objects.place("")).is_dir():
            return {}
        return self.objects.sizes("")

    def has(self, about: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
        """Whether the file of a result is there, and can be read: one of another size may be damaged, or have been written a second time.

        Args:
            about: the result.
            sizes: of all files.
        """
        name = about["file"]
        if name is None or sizes.get(name) == about["nbytes"]:
            return True
        if name not in sizes:
            return False
        from pyarrow import parquet

        try:
            found: int = parquet.read_table(io.BytesIO(self.objects.fetch(name) or b"")).num_rows
        except (OSError, pyarrow().ArrowException):
            return False
        return bool(found == about["rows"])

    def check(self, shown: str, *, has_table: bool) -> None:
        """Refuses a folder with files that are not of this map: they would be part of the table.

        Args:
            shown: its name, for messages.
            has_table: whether there are results of this map.

        Raises:
            JobError: names one.
        """
        for name in self.sizes():
            is_own = NAME.fullmatch(name) is not None
            if is_own and has_table:
                continue
            if is_own:
                raise JobError(
                    f"{shown} has files of results, {name} among them, whose table is gone", remedy="name another --out, or delete it"
                )
            if not any(part.startswith(("_", ".")) for part in name.split("/")):
                raise JobError(f"{shown} has a file {name}, which is none of this map's", remedy="name another --out: a folder of its own")

    def check_source(self, shown: str, names: Collection[str], source: str) -> None:
        """Refuses a folder all of whose files are of another source: they would be deleted.

        Args:
            shown: its name, for messages.
            names: of files that are written, of all partitions.
            source: of these.

        Raises:
            JobError: names one.
        """
        beginnings = {partition_of(name) for name in names}
        there = [name for name in self.sizes() if NAME.fullmatch(name)]
        if there and beginnings.isdisjoint(partition_of(name) for name in there):
            raise JobError(
                f"{shown} has rows of other files, such as {there[0]}, and none of {source}",
                remedy="name another --out, or delete it and its .results",
            )

    def stored(self, key: str, text: str | None, data: bytes | None) -> tuple[str | None, bytes | None]:
        """Takes in what is known of a file, unless its columns are others than those before: then it is deleted.

        Raises:
            UserError: names the column and both types.
        """
        if not data:
            return text, None
        try:
            self.take(data)
        except UserError:
            self.objects.delete([json.loads(text or "{}")["file"]])
            raise
        return text, data

    def take(self, data: bytes) -> None:
        """Takes in the schema of a file, serialised.

        Raises:
            UserError: see `stored`.
        """
        pa = pyarrow()
        found = pa.ipc.read_schema(pa.BufferReader(data))
        if self.schema is None:
            self.schema = found
        if found.equals(self.schema):
            return
        for name in (*self.schema.names, *found.names):
            if name not in found.names:
                raise UserError(f"the result has no column {name!r}, which is {self.schema.field(name).type} in the results before")
            if name not in self.schema.names:
                raise UserError(f"the result has a column {name!r} of {found.field(name).type}, which the results before have not")
        fields = []
        for field in self.schema:
            try:
                both = field.type, found.field(field.name).type
                wider: Any = (
                    "permissive" if all(map(pa.types.is_decimal, both)) else "default"
                )  # pandas has no precision: it is that of the values
                [merged] = pa.unify_schemas([pa.schema([field]), pa.schema([found.field(field.name)])], promote_options=wider)
            except pa.ArrowException:
                raise UserError(
                    f"column {field.name!r} of the result is {found.field(field.name).type}, and {field.type} in the results before: "
                    f"return the same type for all partitions"
                ) from None
            fields.append(merged)
        self.schema = pa.schema(fields)

    def keep(self, names: Collection[str]) -> int:
        """Deletes files of results but some. Returns their number."""
        kept = set(names)
        others = [name for name in self.sizes() if name not in kept and (NAME.fullmatch(name) or _UNFINISHED.fullmatch(name))]
        if others:
            self.objects.delete(others)
        return len(others)

    def state(self) -> str:
        """Of all files."""
        return state_of({name: nbytes for name, nbytes in self.sizes().items() if not name.startswith((".", "_"))})


def state_of(sizes: Mapping[str, int]) -> str:
    """Digest of names and bytes."""
    return hashlib.blake2b(json.dumps(sorted(sizes.items())).encode(), digest_size=16).hexdigest()
