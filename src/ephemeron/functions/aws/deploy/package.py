"""The code that is deployed: a container image's recipe, or a ZIP where that fits. Sizes are refused before an upload.

PyTorch does not fit a ZIP (250 MB unzipped; its CPU build alone has 700): a function that trains is an image. A ZIP
is for functions without it, for those that get it from a layer, and for services that run no images.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ephemeron.errors import JobError
from ephemeron.functions import source_bundle
from ephemeron.functions.shipped_code import python_version
from ephemeron.functions.source_bundle import FunctionEnvironment
from ephemeron.units import MIB

UNZIPPED_MB, ZIPPED_MB, IMAGE_MB = 250, 50, 10 * 1024
"""Quotas of AWS Lambda: unzipped code, ZIP that is uploaded directly, image."""
HANDLER = "ephemeron.functions.aws.handler.handle"
REQUIREMENTS = ("boto3>=1.35.16", *source_bundle.REQUIREMENTS)
_STAMP = (1980, 1, 1, 0, 0, 0)

DOCKERFILE = f"""\
# The function's image: AWS's Python runtime, PyTorch for the CPU, and this release of ephemeron.
FROM public.ecr.aws/lambda/python:{{python}}
COPY requirements.txt .
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -r requirements.txt
COPY ephemeron ${{{{LAMBDA_TASK_ROOT}}}}/ephemeron
CMD ["{HANDLER}"]
"""

BUILD = f"""\
#!/bin/sh
# Builds the image, refuses what Lambda would refuse, and pushes it: ./build.sh REPOSITORY_URI[:TAG]
set -eu
cd "$(dirname "$0")"
uri=${{1:?give the URI of an ECR repository, such as 123456789012.dkr.ecr.us-east-1.amazonaws.com/ephemeron:1}}
docker build --platform linux/amd64 --provenance=false -t "$uri" .
bytes=$(docker image inspect --format '{{{{.Size}}}}' "$uri")
if [ "$bytes" -gt {IMAGE_MB * MIB} ]; then
    echo "error: the image has $((bytes / {MIB})) MB, Lambda takes {IMAGE_MB} MB; leave out what is not needed" >&2
    exit 2
fi
registry=${{uri%%/*}}
region=$(echo "$registry" | cut -d. -f4)
aws ecr get-login-password --region "$region" | docker login --username AWS --password-stdin "$registry"
docker push "$uri"
echo "pushed $uri ($((bytes / {MIB})) MB)"
"""


def write_image_recipe(folder: Path, environment: FunctionEnvironment = FunctionEnvironment()) -> list[Path]:  # noqa: B008 - frozen
    """Dockerfile, requirements, code and `build.sh`; what lay there before is replaced.

    Raises:
        JobError: the folder cannot be written.
    """
    try:
        shutil.rmtree(folder, ignore_errors=True)
        for name, path in source_bundle.sources():
            target = folder / "ephemeron" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        written = {
            "Dockerfile": DOCKERFILE.format(python=environment.version),
            "requirements.txt": environment.requirements([*REQUIREMENTS, *source_bundle.TRAINING]),
            "build.sh": BUILD,
        }
        for name, text in written.items():
            (folder / name).write_text(text)
        (folder / "build.sh").chmod(0o755)
    except OSError as e:
        raise JobError(f"cannot write the image's recipe to {folder}: {e.strerror}") from None
    return [folder / name for name in written]


def build_zip(folder: Path | None = None, *, requirements: Sequence[str] = (), python: str = "") -> bytes:
    """A ZIP of this package and its dependencies, the same bytes each time.

    Args:
        folder: scratch for dependencies; needed with `requirements`.
        requirements: for pip, installed for Lambda's Linux and Python; none where a layer brings them.
        python: version of that; empty: the client's.

    Raises:
        JobError: pip fails, or the result is larger than Lambda takes.
    """
    files = [(f"ephemeron/{name}", path) for name, path in source_bundle.sources()]
    if requirements:
        assert folder is not None
        files += _install(folder, requirements, python or python_version())
    size = sum(path.stat().st_size for _, path in files)
    check_size(size, limit_mb=UNZIPPED_MB, what="the code, unzipped,")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in files:
            entry = zipfile.ZipInfo(name, _STAMP)
            entry.external_attr = (0o755 if os.access(path, os.X_OK) else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    data = out.getvalue()
    check_size(len(data), limit_mb=ZIPPED_MB, what="the ZIP")
    return data


def check_size(nbytes: int, *, limit_mb: int, what: str) -> None:
    """Raises `JobError` if Lambda would refuse it."""
    if nbytes > limit_mb * MIB:
        raise JobError(f"{what} has {nbytes / MIB:.0f} MB, AWS Lambda takes {limit_mb} MB", remedy="deploy an image: --image URI")


def _install(folder: Path, requirements: Sequence[str], python: str) -> list[tuple[str, Path]]:
    target = folder / "dependencies"
    shutil.rmtree(target, ignore_errors=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--target",
            str(target),
            "--platform",
            "manylinux2014_x86_64",
            "--platform",
            "manylinux_2_28_x86_64",
            "--only-binary=:all:",
            "--implementation",
            "cp",
            "--python-version",
            python,
            *requirements,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise JobError(f"pip cannot install the function's dependencies: {last}")
    found = sorted(p for p in target.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return [(str(path.relative_to(target)), path) for path in found]
