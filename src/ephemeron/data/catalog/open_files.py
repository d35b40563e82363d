"""Files below a URL: in a folder of this machine, or in an object store."""

from __future__ import annotations

from pathlib import Path

from ephemeron.config.paths import AnyPath, folder_of, located
from ephemeron.data.catalog.files import Files
from ephemeron.data.catalog.folder import FolderFiles


def open_files(url: AnyPath) -> Files:
    """Opens a folder (a path or `file:///path`), `s3://bucket/prefix`, `gs://…` or `az://…`. Connects on first use.

    Raises:
        JobError: the URL has another scheme.
    """
    url = located(url)
    if "://" not in url:
        return FolderFiles(Path(url))
    if url.startswith("file://"):
        return FolderFiles(folder_of(url))
    from ephemeron.data.catalog.objects import open_objects  # imports obstore

    return open_objects(url)
