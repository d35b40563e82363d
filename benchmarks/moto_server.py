"""moto's S3 server, one request after the other: `python -m benchmarks.moto_server -H 127.0.0.1 -p PORT`.

moto answers requests in threads that share its objects without a lock around what belongs together (seen with moto 5.2.5).
An overwritten or deleted object is closed while another request reads it, which is then answered with status 500
("I/O operation on closed file"); the test of `If-None-Match` and the store are apart; an object is visible before it is
read once more for its ETag, so a client that gets it the moment it appears may receive a part of it. S3 does none of this.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

_lock = threading.RLock()
"""Held while a request is carried out: after its body was received, before its answer is sent."""


def _one_at_a_time(handler: Callable[..., Any]) -> Callable[..., Any]:
    def locked(*arguments: Any) -> Any:
        with _lock:
            return handler(*arguments)

    return locked


if __name__ == "__main__":
    for name in ("_key_response", "_bucket_response"):
        setattr(S3Response, name, _one_at_a_time(getattr(S3Response, name)))
    main(sys.argv[1:])
