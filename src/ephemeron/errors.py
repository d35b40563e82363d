"""Everything ephemeron raises on purpose, in one tree.

    EphemeronError
    ├── UserError                    what was asked for cannot be done; nothing was started
    │   ├── JobError                 a job, a flag or a file is wrong: names the place, the value and the remedy
    │   ├── MissingExtra             an optional dependency is absent: names the command that installs it
    │   └── PlanInfeasible           understood, but some limit forbids it: `binding` names the limit
    ├── PlatformError                the function platform did not do what it was told
    │   ├── InvocationRefused        not started: payload, concurrency or authorisation
    │   └── FunctionError            a function ended, and not well (rank, attempt, iteration)
    │       ├── FunctionFailed       its code raised: carries the remote traceback
    │       ├── FunctionTimedOut     killed at its lifetime limit
    │       ├── OutOfMemory          killed at its memory quota
    │       ├── FunctionLost         it vanished
    │       └── ReplacementsFailed   replacing it has not helped, or the run may replace no more
    ├── ChannelError                 the store between the functions (carries the key)
    │   ├── ChannelTimeout           the key did not appear before the deadline
    │   ├── ChannelUnreachable       the store does not answer: it may later
    │   │   ├── ChannelThrottled     it answers that there are too many requests
    │   │   └── ChannelRefused       it refuses us, and will: credentials, no such bucket, an untrusted certificate
    │   ├── ChannelEmptied           the store answers, and the run's objects are gone
    │   ├── KeyExists                a create-only put found the key taken
    │   └── CorruptMessage           magic, version, length or checksum do not match, or it is another key's
    │       └── DamagedObject        (a ChannelTimeout, too) nothing better was there at the deadline
    ├── NonFiniteValue               a loss, gradient or parameter became NaN or infinite (rank, iteration, batch)
    ├── DatasetNotFound              no dataset, version or variant of that name in the store
    ├── DatasetError                 a stored dataset cannot be read (dataset, version, variant, index, file)
    │   ├── DatasetDamaged           a file is absent, cut short, or not what the metadata says
    │   └── DatasetUnreachable       the store that holds it does not answer, or refuses us
    ├── SampleFailed                 a step of a data flow raised (flow, dataset, index, step, file)
    ├── LoadersLost                  loader processes keep dying, or none can be started
    ├── ServiceUnreachable           no data service answers before the deadline
    ├── ServiceRefused               a data service does not take this token
    ├── RunNotFound                  no run of that name in the home folder
    └── RunFailed                    one or more functions failed for good; `causes` holds why

`UserError` is apart from the rest because its audience is apart: one line, no traceback, exit code 2.
A loss that was expected (a relay, a duplicate that stepped aside) is a value, never an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EphemeronError(Exception):
    """Base of everything ephemeron raises on purpose."""


class UserError(EphemeronError):
    """What was asked for cannot be done. Nothing has been started or paid for."""


class JobError(UserError):
    """A job, a flag or a file is wrong.

    Args:
        problem: one line that names the value and the place.
        remedy: what to write instead; appended after a semicolon.
    """

    def __init__(self, problem: str, *, remedy: str | None = None) -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class MissingExtra(UserError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed; run: pip install 'ephemeron[{extra}]'")
        self.extra = extra


class PlanInfeasible(UserError):
    """The configuration cannot work; `binding` is the limit that forbids it."""

    def __init__(self, problem: str, *, binding: str) -> None:
        super().__init__(f"{problem} (binding limit: {binding})")
        self.binding = binding


class PlatformError(EphemeronError):
    """The function platform did not do what it was told."""


class InvocationRefused(PlatformError):
    """The platform did not start the function; `binding` is the limit that forbids it, where one does."""

    def __init__(self, message: str, *, binding: str = "") -> None:
        super().__init__(message)
        self.binding = binding


class FunctionError(PlatformError):
    """A function ended badly. Carries `rank`, `attempt` and, where known, `iteration`."""

    def __init__(self, message: str, *, rank: int, attempt: int = 0, iteration: int | None = None) -> None:
        at = "" if iteration is None else f" at iteration {iteration}"
        super().__init__(f"rank {rank}, attempt {attempt}{at}: {message}")
        self.problem = message
        self.rank = rank
        self.attempt = attempt
        self.iteration = iteration


class FunctionFailed(FunctionError):
    """The function's own code raised."""


class FunctionTimedOut(FunctionError):
    """The function reached its lifetime limit and was killed."""


class OutOfMemory(FunctionError):
    """The function exceeded its memory quota and was killed."""


class FunctionLost(FunctionError):
    """The function vanished without a word."""


class ReplacementsFailed(FunctionError):
    """Replacing a function has not helped, or the run has used up its replacements."""


class ChannelError(EphemeronError):
    """The store between the functions failed; `key` says at which object, if at one."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message if key is None else f"{message} (key {key})")
        self.problem = message
        self.key = key


class ChannelTimeout(ChannelError):
    """The key did not appear before the deadline."""


class ChannelUnreachable(ChannelError):
    """The store does not answer, or refuses us. Where no subclass says more, it may answer later."""


class ChannelThrottled(ChannelUnreachable):
    """The store answers that there are too many requests, or has no room for now."""


class ChannelRefused(ChannelUnreachable):
    """The store refuses us, and will refuse the next request."""


class ChannelEmptied(ChannelError):
    """The store answers, and the objects of the run are gone."""


class KeyExists(ChannelError):
    """A create-only put found the key taken."""


class CorruptMessage(ChannelError):
    """Bytes in the store are not a message of ours, or are damaged."""


class NonFiniteValue(EphemeronError):
    """Training met a NaN or an infinite number. What follows it would be paid for in vain.

    Args:
        what: that is not finite, with its value where it has one.
        rank: that met it first, as far as it knows.
        iteration: counted over all epochs.
        batch: which samples, in words.
    """

    def __init__(self, what: str, *, rank: int, iteration: int, batch: str = "") -> None:
        super().__init__(
            f"rank {rank}, iteration {iteration}{f' ({batch})' if batch else ''}: {what}; checkpoints before it are kept: "
            'mend the cause and resume, or go on regardless with on_non_finite = "continue"'
        )
        self.what = what
        self.rank = rank
        self.iteration = iteration
        self.batch = batch


class DamagedObject(ChannelTimeout, CorruptMessage):
    """What was under the key until the deadline was damaged, or another key's."""


class DatasetNotFound(UserError):
    """There is no such dataset, version or variant in the store."""


class DatasetError(EphemeronError):
    """A stored dataset cannot be read. Says where, as far as it is known.

    Args:
        message: what is wrong, in one line.
        dataset: `namespace/name`.
        version: the version's name.
        variant: e.g. `train`.
        index: the sample's number within the variant.
        file: the file's URL.
    """

    def __init__(
        self,
        message: str,
        *,
        dataset: str = "",
        version: str = "",
        variant: str = "",
        index: int | None = None,
        file: str = "",
    ) -> None:
        place = [dataset, version and f"version {version}", variant, "" if index is None else f"sample {index}"]
        where = ", ".join(part for part in place if part)
        text = f"{file}: {message}" if file else message
        super().__init__(f"{where}: {text}" if where else text)
        self.problem = message
        self.dataset = dataset
        self.version = version
        self.variant = variant
        self.index = index
        self.file = file


class DatasetDamaged(DatasetError):
    """A file is absent, cut short, or not what the metadata says."""


class DatasetUnreachable(DatasetError):
    """The store that holds the dataset does not answer, or refuses us."""


class RunNotFound(UserError):
    """There is no such run in the home folder."""


class RunFailed(EphemeronError):
    """A run ended without a result. The run can be resumed once the cause is mended.

    Args:
        run_id: the run's name.
        causes: one line for each function that failed for good.
        result: what `train` would have returned: summary and folder of the run.
    """

    def __init__(self, run_id: str, causes: Sequence[str], result: Any = None) -> None:
        super().__init__(f"run {run_id} failed: " + "; ".join(causes))
        self.run_id = run_id
        self.causes = tuple(causes)
        self.result = result


class SampleFailed(EphemeronError):
    """A sample of a data flow could not be loaded."""

    def __init__(self, message: str, *, flow: str, dataset: str, index: int, step: str, file: str = "") -> None:
        where = f"flow {flow}, dataset {dataset}, sample {index}, step {step!r}" + (f", file {file}" if file else "")
        super().__init__(f"{where}: {message}")
        self.message = message
        self.flow = flow
        self.dataset = dataset
        self.index = index
        self.step = step
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return _sample_failed, (self.message, self.flow, self.dataset, self.index, self.step, self.file)


def _sample_failed(message: str, flow: str, dataset: str, index: int, step: str, file: str) -> SampleFailed:
    return SampleFailed(message, flow=flow, dataset=dataset, index=index, step=step, file=file)


class LoadersLost(EphemeronError):
    """Loader processes keep dying, or none can be started."""


class ServiceUnreachable(EphemeronError):
    """No data service answers, or one that did is gone and does not come back before the deadline."""


class ServiceRefused(EphemeronError):
    """A data service does not take this token."""
