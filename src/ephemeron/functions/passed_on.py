"""Variables of a client's environment that functions see. All others stay with the client."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping

from ephemeron.communication.channels import credentials
from ephemeron.config.paths import DATASETS_STORE, datasets_store

SERVICES = ("EPHEMERON_SPARSE_TOKEN", "EPHEMERON_DATA_SERVICE", "EPHEMERON_DATA_TOKEN")
"""Of the services that a job's functions use, which are deployed with functions of clouds, or go to them with each call."""
KERNELS = ("OPENBLAS_CORETYPE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES")
"""Which instructions numerical libraries use: with others the last digits of sums differ from the client's."""
PASSED_ON = (
    "PATH",
    "LANG",
    "LC_*",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "AWS_*",
    "GOOGLE_*",
    "AZURE_*",
    "EPHEMERON_CHANNEL_*",
    "EPHEMERON_DIRECT_*",
    "EPHEMERON_RENDEZVOUS*",
    "EPHEMERON_REGION_*",
    "EPHEMERON_SPARSE_*",
    *SERVICES,
    *KERNELS,
    "EPHEMERON_ENTRIES",
    "EPHEMERON_LOG_LEVEL",
    "EPHEMERON_LOG_FORMAT",
    "SSL_CERT_*",
    "REQUESTS_CA_BUNDLE",
)
"""Patterns of the names that functions of this machine see."""


def daemon_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a daemon and its functions: those that are passed on, those of the channel, and `extra`.

    Functions have another home folder, and read the client's datasets all the same.
    """
    kept = {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, pattern) for pattern in PASSED_ON)}
    return {**kept, DATASETS_STORE: datasets_store(), **credentials.given(), **extra}
