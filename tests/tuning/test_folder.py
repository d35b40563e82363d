"""A folder of a study that cannot be written."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from ephemeron.errors import JobError
from ephemeron.tuning.folder import StudyFolder, written

FULL, READ_ONLY = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EROFS, "Read-only file system")


class OperationalError(Exception):
    """As SQLAlchemy wraps an error of SQLite."""

    orig = sqlite3.OperationalError("database or disk is full")


@pytest.mark.parametrize("error", [FULL, READ_ONLY, OperationalError()], ids=str)
def test_it_is_one_line(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(JobError, match=r"the study in .* cannot be written: .*--resume"), written(tmp_path):
        raise error


def test_a_home_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"cannot make .*/file/study: Not a directory; set EPHEMERON_HOME"):
        StudyFolder(tmp_path / "file" / "study").driving().__enter__()


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "no such file")
    with pytest.raises(ZeroDivisionError), written(tmp_path):
        raise ZeroDivisionError
