"""A folder of a study that cannot be written."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from ephemeron.errors import JobError
from ephemeron.tuning.folder import written

FULL, READ_ONLY = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EROFS, "Read-only file system")


class OperationalError(Exception):
    """As SQLAlchemy wraps an error of SQLite."""

    orig = sqlite3.OperationalError("database or disk is full")


@pytest.mark.parametrize("error", [FULL, READ_ONLY, OperationalError()], ids=str)
def test_it_is_one_line(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(JobError, match=r"the study in .* cannot be written: .*--resume"), written(tmp_path):
        raise error


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "no such file")
    with pytest.raises(ZeroDivisionError), written(tmp_path):
        raise ZeroDivisionError
