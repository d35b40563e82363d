"""AWS Lambda MicroVMs on loopback: real supervisors in real processes, behind the API of `boto3`.

Requests and answers are checked against the service model that botocore ships, required members, lengths, patterns and
enumerations included. Behind it, as AWS documents it:

    boto3 ──CreateMicrovmImage──▶ ZIP with a Dockerfile: its CMD is started, hooks `ready` and `validate` are called
          ──RunMicrovm──────────▶ a process from the image, hook `run` with the payload        PENDING, RUNNING
          ──SuspendMicrovm──────▶ hook `suspend`, SIGSTOP for all of it                        SUSPENDED
          ──ResumeMicrovm───────▶ SIGCONT, hook `resume`                                       RUNNING
          ──TerminateMicrovm────▶ hook `terminate`, SIGKILL                                    TERMINATED
          ──CreateMicrovmAuthToken──▶ a token for ports of the MicroVM's own endpoint

It ends what has reached its maximum duration, suspends what its idle policy says, refuses above its quotas, and throttles when
it is told to. A guest's monotonic clock stands still while it is suspended, as in a virtual machine. The service binds to
loopback only, runs in a thread of its owner and ends with it.

    with MicrovmService() as service:
        client = boto3.client("lambda-microvms", endpoint_url=service.url, region_name="us-east-1")

What it is not: nothing is virtualised and no memory is snapshotted, so a MicroVM starts as its image was built, by running the
command, and takes as long; with `ahead`, some are started in advance and stopped. Images are not built (requirements are those of this interpreter), signatures are not verified, no
network separates MicroVMs, and hooks are told apart by their port.
"""

from __future__ import annotations

from ephemeron.testing.microvm_service.service import MicrovmService, RunningMicrovm

__all__ = ["MicrovmService", "RunningMicrovm"]
