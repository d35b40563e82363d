"""AWS Lambda on loopback: the real runtime client in real processes, behind the API of `boto3`.

Nothing of Amazon's runs here but the two ends: `boto3` before it, with `endpoint_url`, and `awslambdaric` in every
function's process. Between them, as AWS documents it:

    boto3 ──Invoke──▶ Invoker ──▶ Environment ──Runtime API──▶ awslambdaric ──▶ the deployed handler
                       │ 202, queue, retries,      │ next, response, error, init/error
                       │ 429, 413, recursion       │ quota, CPU share, time limit, frozen between calls
                       ▼                           ▼
                 CreateFunction …            CloudWatch Logs: START, output, END, REPORT

Functions run from their deployed ZIP; other modules are found in this interpreter, as in a
layer. The service binds to loopback only, runs in a thread of its owner and ends with it.

    with LambdaService(concurrency=10) as service:
        client = boto3.client("lambda", endpoint_url=service.url, region_name="us-east-1")

What it is not: signatures are not verified, no images are run, no network separates functions, there are no
versions or aliases, and cold starts are those of this machine. For tests and for trying things, never for others.
"""

from __future__ import annotations

from ephemeron.testing.lambda_service.service import Guard, LambdaService, RunningLambdaService

__all__ = ["Guard", "LambdaService", "RunningLambdaService"]
