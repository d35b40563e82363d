"""Distributions made by hand: tests install packages of a folder, and nothing from a network."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, source: str, requires: Sequence[str] = ()) -> Path:
    """A wheel with one package of one module.

    Args:
        folder: for it; made when missing.
        name, version: of the distribution and its package.
        source: of the package.
        requires: requirements of it.
    """
    folder.mkdir(exist_ok=True)
    about, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires), ""]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", source)
        file.writestr(f"{about}/METADATA", "\n".join(metadata))
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return path
