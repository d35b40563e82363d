"""The code artifact: a ZIP with a Dockerfile at its root, from which Lambda builds the image and takes its snapshot.

PyTorch is imported in the snapshot, so that a MicroVM starts with the imports made. Nothing of a run is in it: no variable of
the environment is secret, and no random state is used before the run hook.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

from ephemeron.errors import JobError
from ephemeron.functions import source_bundle
from ephemeron.functions.aws_microvm.handler import PORT

PYTHON = "3.12"
REQUIREMENTS = ("boto3>=1.44", "websockets>=15", *source_bundle.REQUIREMENTS)
_STAMP = (1980, 1, 1, 0, 0, 0)

DOCKERFILE = f"""\
# The image of a MicroVM (arm64): AWS's base, PyTorch for the CPU, and this release of ephemeron.
FROM public.ecr.aws/lambda/microvms:al2023-minimal
RUN dnf install -y python{PYTHON} python{PYTHON}-pip && dnf clean all
WORKDIR /app
COPY requirements.txt .
RUN python{PYTHON} -m pip install --no-cache-dir -r requirements.txt
COPY ephemeron ephemeron
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1
EXPOSE {PORT}
CMD ["python{PYTHON}", "-m", "ephemeron.functions.aws_microvm.handler"]
"""


def build_artifact() -> bytes:
    """The ZIP, the same bytes each time."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, data: bytes, mode: int) -> None:
            entry = zipfile.ZipInfo(name, _STAMP)
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)

        add("Dockerfile", DOCKERFILE.encode(), 0o644)
        add("requirements.txt", "\n".join([*REQUIREMENTS, *source_bundle.TRAINING, ""]).encode(), 0o644)
        for name, path in source_bundle.sources():
            add(f"ephemeron/{name}", path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644)
    return out.getvalue()


def write_artifact(path: Path) -> bytes:
    """Writes the ZIP, and returns it.

    Raises:
        JobError: it cannot be written.
    """
    data = build_artifact()
    try:
        path.write_bytes(data)
    except OSError as e:
        raise JobError(f"cannot write the image's code to {path}: {e.strerror}") from None
    return data
