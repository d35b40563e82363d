"""moto's S3 server without one of its races: `python -m benchmarks.moto_server -H 127.0.0.1 -p PORT`.

moto makes an object visible and then reads it once more for its ETag, without the lock under which other threads
read it. A client that gets an object the moment it appears, as workers do all the time, may receive a part of
it or nothing (seen with moto 5.2.5; messages' checksums detect it).
"""

from __future__ import annotations

import sys

from moto.s3.models import FakeKey
from moto.server import main

_etag = FakeKey.etag.fget


def _locked_etag(key: FakeKey) -> str:
    with key.lock:
        return str(_etag(key))


if __name__ == "__main__":
    FakeKey.etag = property(_locked_etag)
    main(sys.argv[1:])
