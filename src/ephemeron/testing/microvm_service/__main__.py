"""`python -m ephemeron.testing.microvm_service`: emulated MicroVMs for experiments, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from ephemeron.testing.microvm_service.service import MicrovmService

PASSED_ON = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "EPHEMERON_CHANNEL_CA")
"""Variables of this process that MicroVMs get: addresses of their stores."""


def main() -> None:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser(prog="python -m ephemeron.testing.microvm_service", description=__doc__)
    parser.add_argument("--port", type=int, default=9002)
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--memory-gb", type=float, default=8.0, help="of all MicroVMs; new accounts have 8")
    parser.add_argument("--ahead", type=int, default=0, metavar="N", help="start N MicroVMs of each image in advance")
    wanted = parser.parse_args()
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    service = MicrovmService(
        port=wanted.port, region=wanted.region, memory_gb=wanted.memory_gb, ahead=wanted.ahead, environment=environment
    )
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the thread starts, which inherits it
    with service:
        sys.stdout.write(f"AWS Lambda MicroVMs in {wanted.region} on {service.url}\n")
        sys.stdout.flush()
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
