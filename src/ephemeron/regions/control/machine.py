"""The port of a control function's decisions: requests in, answers out, and a state that is stored. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class ControlMachine(ABC):
    """Decisions of one control function. Requests, answers and the state are JSON objects.

    A request is applied once: `ControlFunction` stores the state after it together with its answer.
    """

    @abstractmethod
    def apply(self, request: Mapping[str, Any], now: float) -> Mapping[str, Any]:
        """Answer to a request, which may change the state.

        Args:
            request: of a client.
            now: time of this function's own clock, seconds. It is compared with other times of the same function alone.

        Raises:
            JobError: the request is not one of this function's, or is refused; the state is as before.
        """

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Everything that a successor needs."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any], now: float) -> None:
        """Takes over the state of a predecessor, whose clock is not known.

        Raises:
            JobError: it is not a state of this function.
        """
