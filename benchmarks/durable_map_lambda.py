"""The part `lambda` of `benchmarks.durable_map`: a durable map on many functions of an emulated Lambda, some calls throttled, others delivered twice."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.durable_map_sides import FUNCTIONS
from ephemeron.maps import map_items
from ephemeron.maps.result_table import ResultTable

MEMORY_MB = 256


def _throttle(service: Any, requests: int, store: Path) -> None:
    """Once the map has opened its store, that many requests are refused: what is checked before is not."""
    while not store.exists():
        time.sleep(0.002)
    service.throttle(requests)


def on_lambda(items: int, seconds: float, functions: int, place: Path, *, throttled: int, duplicates: int) -> dict[str, Any]:
    """A map of sleeping items.

    Args:
        items: of the map.
        seconds: of an item.
        functions: at once.
        place: folder with the module of the functions.
        throttled: requests that are refused with 429.
        duplicates: calls that are delivered twice.
    """
    from ephemeron.functions.aws.deploy.function import LambdaSpec, deploy
    from ephemeron.functions.aws.deploy.package import build_zip
    from ephemeron.functions.aws.settings import AwsSettings, client
    from ephemeron.functions.source_bundle import digest
    from ephemeron.testing.lambda_service import LambdaService

    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_REGION="us-east-1")
    log, most = place / "calls.txt", 0
    with LambdaService(concurrency=functions, enforce=False) as service, contextlib.chdir(place):
        settings = AwsSettings(region="us-east-1", endpoint=service.url)
        wanted = LambdaSpec(
            role="arn:aws:iam::123456789012:role/none",
            memory_mb=MEMORY_MB,
            timeout_s=300,
            zipped=build_zip(),
            variables={},
            digest=digest(),
        )
        deploy(client(settings, "lambda"), settings, wanted)
        service.deliver_twice(duplicates)
        threading.Thread(target=_throttle, args=(service, throttled, place / "objects"), daemon=True).start()
        sys.path.insert(0, str(place))
        began = time.monotonic()
        try:
            result = map_items(
                f"{FUNCTIONS}:counted_slowly",
                ({"n": str(n), "seconds": seconds, "log": str(log)} for n in range(items)),
                key="n",
                out="out.jsonl",
                platform="aws",
                settings=settings,
                channel=(place / "objects").as_uri(),
                max_workers=functions,
                progress=False,
            )
            seconds_taken = time.monotonic() - began
            most = len(service.environments())
        finally:
            sys.path.remove(str(place))
        left = service.invoker.faults
    rows = Counter(
        key for part in ResultTable.open((place / "out.jsonl.results").as_uri()).scan(("key",)) for key in part.column(0).to_pylist()
    )
    calls = len(log.read_text().split())
    wrong = sum(value != n for n, value in enumerate(result))
    missing, several = items - len(rows), sum(count > 1 for count in rows.values())
    assert result.bill is not None
    return {
        "is_right": not (missing or several or wrong),
        "items": items,
        "item_s": seconds,
        "functions": functions,
        "environments": most,
        "throttled": throttled - left.throttle,
        "duplicates": duplicates - left.deliver_twice,
        "keys_without_row": missing,
        "keys_with_several_rows": several,
        "wrong_results": wrong,
        "calls": calls,
        "repeated_share": round((calls - items) / calls, 5),
        "seconds": round(seconds_taken, 2),
        "bound_s": round(items * seconds / functions, 2),
        "invocations": result.bill.invocations,
        "gb_seconds": round(result.bill.gb_seconds, 1),
    }
