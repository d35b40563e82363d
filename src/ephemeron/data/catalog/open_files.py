"""Files below a URL: in a folder of this machine, or in an object store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ephemeron.config.paths import AnyPath, located
from ephemeron.data.catalog.files import Files
from ephemeron.data.catalog.folder import FolderFiles
from ephemeron.errors import JobError


def open_files(url: AnyPath) -> Files:
    """Opens a folder (a path or `file:///path`), `s3://bucket/prefix`, `gs://…` or `az://…`. Connects on first use.

    Raises:
        JobError: the URL has another scheme.
    """
    url = located(url)
    if "://" not in url:
        return FolderFiles(Path(url))
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise JobError(f"{url} is not a folder on this machine", remedy="write file:///absolute/path")
        return FolderFiles(Path(unquote(parts.path)))
    from ephemeron.data.catalog.objects import open_objects  # imports obstore

    return open_objects(url)
