"""States of MicroVMs as log source: those that ended without an outcome, and MicroVMs that outlive their call.

One request lists the MicroVMs of an image, those of other runs included; a second one asks about each MicroVM that has ended
while its call has not. A MicroVM whose call has ended terminates itself; where it cannot, it is terminated from here.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence

from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.aws.settings import THROTTLED, code_of
from ephemeron.functions.aws_microvm.api import ENDED, MicrovmApi, MicrovmInfo
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, explain

LEFT_S = 10.0
"""Seconds that a MicroVM has to terminate itself after its call has ended."""
MISSING_S = 15.0
"""Seconds after which a MicroVM that the service does not know is gone."""
_log = logging.getLogger(__name__)


class MicrovmStates:
    """A log source for one run.

    Args:
        api: of the service.
        settings: for messages.
        image_arns: of the images.
        open: requests (ids of MicroVMs) whose call has not ended, as far as it is known.
        ended: requests whose call has.
        clock: seconds.
    """

    def __init__(
        self,
        api: MicrovmApi,
        settings: AwsMicrovmSettings,
        image_arns: Sequence[str],
        *,
        open: Callable[[], Collection[str]],
        ended: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem = ""
        """Why states cannot be read; empty: they can."""
        self._api, self._settings, self._image_arns, self._clock = api, settings, image_arns, clock
        self._open, self._ended = open, ended
        self._told: set[str] = set()
        self._gone: set[str] = set()
        """Ended, as their calls have."""
        self._left_since: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}

    async def poll(self) -> list[LogReport | Death]:
        """MicroVMs that have ended before their call did; none while requests are throttled or refused."""
        waiting = [id for id in self._open() if id not in self._told]
        try:
            ended = [id for id in self._ended() if id not in self._gone]
            states = await self._api.states(self._image_arns, [*waiting, *ended])
            out: list[LogReport | Death] = []
            for id in waiting:
                if states[id] in ENDED:
                    microvm = await self._api.get(id)
                    if microvm.state in ENDED if microvm is not None else self._missing(id):
                        self._told.add(id)
                        out += _reports(id, microvm)
            await self._terminate_left([id for id in ended if states[id] not in ENDED])
            self._gone.update(id for id in ended if states[id] in ENDED)
            self.problem = ""
            return out
        except Exception as e:  # noqa: BLE001 - botocore makes its error classes at run time
            if code_of(e) not in THROTTLED:
                self.problem = "; ".join(explain(e, self._settings, doing="lambda:ListMicrovms"))
            return []

    async def tail(self, stream: str, request: str) -> list[str]:
        """None: CloudWatch keeps the output of functions."""
        return []

    def _missing(self, id: str) -> bool:
        """Whether a MicroVM has been unknown for long: the service tells of new ones a moment late."""
        now = self._clock()
        return now - self._missing_since.setdefault(id, now) >= MISSING_S

    async def _terminate_left(self, ids: Collection[str]) -> None:
        now = self._clock()
        self._left_since = {id: self._left_since.get(id, now) for id in ids}
        for id in [id for id, since in self._left_since.items() if now - since >= LEFT_S]:
            _log.info("MicroVM %s has not terminated itself", id)
            await self._api.terminate(id)


def _reports(id: str, microvm: MicrovmInfo | None) -> list[LogReport | Death]:
    """End and bill of a MicroVM; None: the service does not know it any more."""
    if microvm is None:
        return [Death(request=id, stream="", timed_out=False, text="its MicroVM is gone")]
    late = microvm.lived_s >= microvm.maximum_s
    text = f"its MicroVM ended: {microvm.reason or 'no reason was given'}"
    death = Death(request=id, stream="", timed_out=late, text=text)
    if not microvm.lived_s:
        return [death]
    # Suspensions included: an upper bound, and the only figure for a MicroVM that is gone.
    billed_s = float(math.ceil(microvm.lived_s))
    return [LogReport(request=id, stream="", billed_s=billed_s, size_mb=1.0, used_mb=0.0), death]
