"""Recipe of the image: of-watchdog in front of the handler, PyTorch for the CPU, and this release of ephemeron.

of-watchdog runs in HTTP mode: one handler process per replica. `max_inflight=1` makes it answer 429 while a call
runs, and its `/_/ready` not ready, so that a cluster that probes for readiness sends no second call there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ephemeron.errors import JobError
from ephemeron.functions.source_bundle import REQUIREMENTS, TRAINING, sources

PYTHON = "3.12"
WATCHDOG = "0.11.5"

DOCKERFILE = f"""\
# The function's image: of-watchdog, PyTorch for the CPU, and this release of ephemeron.
FROM --platform=${{TARGETPLATFORM:-linux/amd64}} ghcr.io/openfaas/of-watchdog:{WATCHDOG} AS watchdog
FROM --platform=${{TARGETPLATFORM:-linux/amd64}} docker.io/library/python:{PYTHON}-slim

COPY --from=watchdog /fwatchdog /usr/bin/fwatchdog
RUN chmod +x /usr/bin/fwatchdog && useradd --create-home --uid 1000 app
WORKDIR /home/app
COPY requirements.txt .
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -r requirements.txt
COPY ephemeron ./ephemeron
USER 1000

ENV PYTHONPATH=/home/app PYTHONUNBUFFERED=1
ENV fprocess="python3 -P -m ephemeron.functions.openfaas.handler"
ENV mode=http http_upstream_url=http://127.0.0.1:5000 ready_path=/ready max_inflight=1
ENV prefix_logs=false log_buffer_size=-1
# Timeouts follow the function's lifetime: `ephemeron cloud deploy openfaas` sets them.

EXPOSE 8080
HEALTHCHECK --interval=5s CMD [ -e /tmp/.lock ] || exit 1
CMD ["fwatchdog"]
"""

BUILD = """\
#!/bin/sh
# Builds the image and pushes it to a registry that the cluster can pull from: ./build.sh REGISTRY/NAME:TAG
set -eu
cd "$(dirname "$0")"
image=${1:?give a name such as ghcr.io/you/ephemeron:1}
docker build --platform linux/amd64 -t "$image" .
docker push "$image"
echo "pushed $image; now: ephemeron cloud deploy openfaas --image $image"
"""


KIT = ("testing/__init__.py", "testing/platform_entries.py")


def write_recipe(folder: Path, *, kit: bool = False) -> list[Path]:
    """Dockerfile, requirements, code and `build.sh`; what lay there before is replaced.

    Args:
        folder: made when missing.
        kit: with the entries that the platform contract runs, for an image to try a cluster with.

    Raises:
        JobError: the folder cannot be written, or holds something else.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "Dockerfile").exists():
        raise JobError(f"folder {folder} holds something else", remedy="give an empty one with --out")
    written = {"Dockerfile": DOCKERFILE, "requirements.txt": "\n".join([*REQUIREMENTS, *TRAINING, ""]), "build.sh": BUILD}
    try:
        shutil.rmtree(folder / "ephemeron", ignore_errors=True)
        root = Path(__file__).parents[3]
        for name, path in [*sources(), *((name, root / name) for name in KIT if kit)]:
            target = folder / "ephemeron" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        for name, text in written.items():
            (folder / name).write_text(text)
        (folder / "build.sh").chmod(0o755)
    except OSError as e:
        raise JobError(f"cannot write the image's recipe to {folder}: {e.strerror}") from None
    return [folder / name for name in written]
