"""`python -m ephemeron.testing.openfaas_gateway IMAGE=FOLDER…`: an emulated gateway for experiments, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from ephemeron.functions.openfaas.settings import PASSWORD_ENV
from ephemeron.testing.openfaas_gateway.service import OpenFaasGateway

PASSED_ON = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
"""Variables of this process that functions get: addresses of their stores."""


def main() -> None:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser(prog="python -m ephemeron.testing.openfaas_gateway", description=__doc__)
    parser.add_argument("images", nargs="*", metavar="IMAGE=FOLDER", help="a name, and the recipe it stands for")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--inflight", type=int, default=10, help="asynchronous calls at the same time")
    wanted = parser.parse_args()
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    gateway = OpenFaasGateway(
        port=wanted.port, inflight=wanted.inflight, environment=environment, password=os.environ.get(PASSWORD_ENV, "")
    )
    for image in wanted.images:
        name, _, folder = image.partition("=")
        gateway.add_image(name, Path(folder).resolve())
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the thread starts, which inherits it
    with gateway:
        sys.stdout.write(f"OpenFaaS gateway on {gateway.url}\n")
        sys.stdout.flush()
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
