"""`python -m ephemeron.testing.lambda_service`: an emulated Lambda service for experiments, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from ephemeron.testing.lambda_service.service import LambdaService

PASSED_ON = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "EPHEMERON_CHANNEL_PASSWORD", "EPHEMERON_CHANNEL_USER", "EPHEMERON_CHANNEL_CA")
"""Variables of this process that functions get: addresses of their stores."""


def main() -> None:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser(prog="python -m ephemeron.testing.lambda_service", description=__doc__)
    parser.add_argument("--port", type=int, default=9001)
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--concurrency", type=int, default=10, help="of the account; new accounts have 10")
    parser.add_argument("--deliver-twice", type=int, default=0, metavar="N", help="run the next N calls twice")
    wanted = parser.parse_args()
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    service = LambdaService(port=wanted.port, region=wanted.region, concurrency=wanted.concurrency, environment=environment)
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the thread starts, which inherits it
    with service:
        service.deliver_twice(wanted.deliver_twice)
        sys.stdout.write(f"AWS Lambda in {wanted.region} on {service.url}\n")
        sys.stdout.flush()
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
