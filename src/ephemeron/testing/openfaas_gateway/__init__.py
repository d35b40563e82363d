"""OpenFaaS on loopback: a gateway, its queue and of-watchdog, in front of real handler processes.

Written from the public documents of openfaas/faas (`api-docs/spec.openapi.yml`), of-watchdog and the queue-worker; no code of theirs
runs here. A replica runs the command of its image's recipe.

    client ──/system/…──▶ routes, basic authentication ──▶ functions, secrets, replicas
      ├──/function/NAME──▶ a replica, whichever ──▶ Watchdog: max_inflight 429, exec_timeout 504 ──HTTP──▶ the handler
      └──/async-function/NAME──▶ 202, X-Call-Id ──▶ queue ──▶ the same, with retries ──▶ POST X-Callback-Url

An image is a folder with a Dockerfile as `ephemeron cloud deploy openfaas` writes it: its ENV lines and what it copies are used,
and what it would install is found in this interpreter. Each replica is one process on a port of its own, under a memory
quota and a CPU share by control groups where there are any, and is started again when it dies.

    with OpenFaasGateway(password="secret") as gateway:
        gateway.add_image("example/ephemeron:1", folder)

It binds to loopback only, runs in a thread of its owner and ends with it. Limitations: there are no containers and
no network between them, no autoscaler, one namespace, and start-up takes what this machine takes.
"""

from __future__ import annotations

from ephemeron.testing.openfaas_gateway.service import OpenFaasGateway, RunningGateway

__all__ = ["OpenFaasGateway", "RunningGateway"]
