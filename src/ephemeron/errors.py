"""Everything ephemeron raises on purpose, in one tree.

    EphemeronError
    ├── UserError                    what was asked for cannot be done; nothing was started
    │   ├── JobError                 a job, a flag or a file is wrong: names the place, the value and the remedy
    │   │   ├── TraceMismatch        a traced model does not compute what the original computes
    │   │   ├── NotRepresentable     numbers of prepared data that float32 or float64 do not hold (column, rows, reason)
    │   │   ├── NotComputed          a value is asked for of a matrix that is only planned
    │   │   └── ProgramError         a LAmbdaPACK program is wrong: names file, line and column
    │   ├── MissingExtra             an optional dependency is absent: names the command that installs it
    │   ├── PlanInfeasible           understood, but some limit forbids it: `binding` names the limit
    │   ├── TableTaken               another client has changed a table of results
    │   ├── RunNotFound              no run of that name in the home folder
    │   ├── RunAlreadyDriven         another client drives the run
    │   └── DatasetNotFound          no dataset, version or variant of that name in the store
    ├── PlatformError                the function platform did not do what it was told
    │   ├── DaemonGone               no process hosts the local functions of a run
    │   ├── GatewayError             an OpenFaaS gateway refused a request or did not answer (status, text)
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
    │   ├── UpdateForgotten          the region that sent an update keeps it no more
    │   ├── SignatureRefused         an object was not signed with the run's key, under this name
    │   └── CorruptMessage           magic, version, length or checksum do not match, or it is another key's
    │       └── DamagedObject        it lasts, and nobody is bound to put the object again
    ├── RpcError                     a call or a stream between two processes
    │   ├── RemoteError              the handler at the other end raised (type, text)
    │   ├── TokenRefused             the two ends do not share a token
    │   ├── ProtocolError            a frame is damaged or exceeds a limit; the connection is closed
    │   ├── CallTimedOut             (also a TimeoutError) no answer before the deadline
    │   └── ConnectionLost           (also a ConnectionError) the connection ended; `may_repeat` says whether to repeat
    ├── RegionSuperseded             a newer attempt of the same region exchanges updates with the others
    ├── LinkFailed                   (also a ConnectionError) no connection to another function of a run, or it was lost
    ├── NonFiniteValue               a loss, gradient or parameter became NaN or infinite (rank, iteration, batch)
    ├── DatasetError                 a stored dataset cannot be read (dataset, version, variant, index, file)
    │   ├── DatasetDamaged           a file is absent, cut short, or not what the metadata says
    │   ├── FileVersionChanged       a file is not the version that the metadata pins (path, wanted, found)
    │   ├── PickleRefused            a pickled file asks for more than arrays and plain containers
    │   └── DatasetUnreachable       the store that holds it does not answer, or refuses us
    ├── SampleFailed                 a step of a data flow raised (flow, dataset, index, step, file)
    ├── StageFailed                  a device of a divided model failed (device, stage, iteration, operator)
    ├── SimulationDeadlock           in virtual time, every task waits for another one
    ├── LoadersLost                  loader processes keep dying, or none can be started
    ├── ServiceUnreachable           no data service, sparse store or price list answers before the deadline
    ├── ServiceRefused               a data service does not take this token, or another client has this one's name
    ├── TaskFailed                   a task of an executor has no result (task, traceback, tries)
    ├── BudgetReached                the tasks of an executor have cost what they may
    ├── MatrixError                  a kernel cannot go on with the values of a tile (kernel, position); NumPy's `LinAlgError`, too
    │   ├── NotPositiveDefinite      the leading block up to a position is not positive definite
    │   ├── SingularMatrix           a pivot is exactly zero
    │   ├── NotHermitian             a value is not the conjugate of its mirror image
    │   ├── NotFinite                a value is NaN or infinite
    │   └── NotConverged             an iteration for eigenvalues or singular values did not converge
    ├── RunStopped                   a run was stopped, and what its client waits for has no result
    └── RunFailed                    one or more functions failed for good; `causes` holds why

`UserError` is apart from the rest because its audience is apart: one line, no traceback, exit code 2.
A loss that was expected (a relay, a duplicate that stepped aside) is a value, never an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class EphemeronError(Exception):
    """Base of everything ephemeron raises on purpose."""


class UserError(EphemeronError):
    """The request cannot be carried out. Nothing has been started or paid for."""


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


class NotRepresentable(JobError):
    """A step of a preparation would make numbers infinite, or zero, that are not.

    Args:
        step: name of the step.
        column: of the first of them.
        rows: all such rows, from 0, ascending.
        reason: what is wrong with the first one.
        remedy: what to do about it.
    """

    def __init__(self, *, step: str, column: str, rows: Sequence[int], reason: str, remedy: str | None = None) -> None:
        super().__init__(f"{step}: column {column}, row {rows[0]}: {reason}", remedy=remedy)
        self.column, self.rows, self.reason = column, tuple(rows), reason


class ProgramError(JobError):
    """A LAmbdaPACK program breaks a rule of the language.

    Args:
        problem: one line that names what is wrong.
        location: file, line and column, from 1, as `FILE:LINE:COLUMN`.
        remedy: what to write instead.
    """

    def __init__(self, problem: str, *, location: object, remedy: str | None = None) -> None:
        super().__init__(f"{location}: {problem}", remedy=remedy)
        self.location = str(location)


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


class UpdateForgotten(ChannelError):
    """A region has so many later updates that it keeps this one no more: begin anew from a snapshot."""


class SignatureRefused(ChannelError):
    """An object was not written by a party that has the run's key, or was written for another name."""


class CorruptMessage(ChannelError):
    """Bytes in the store are not a message of ours, or are damaged."""


class RegionSuperseded(EphemeronError):
    """A newer attempt of this region has joined: this one must end."""


class LinkFailed(EphemeronError, ConnectionError):
    """No connection to a member, or it was lost."""


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


class DamagedObject(CorruptMessage):
    """What is under the key is damaged, or belongs to another key, and stays so: neither present nor absent."""


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
        self, message: str, *, dataset: str = "", version: str = "", variant: str = "", index: int | None = None, file: str = ""
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


class TaskFailed(EphemeronError):
    """A task raised in every try, or every function that began it died. `traceback` is that of the task's own code, `__cause__` what it
    raised, where that is an `Exception` that can be pickled there and read here; `lost` the status with which the latest function ended that died
    with it, where that is known."""

    def __init__(self, text: str, *, task: str, traceback: str = "", tries: int = 1, lost: str = "") -> None:
        super().__init__(text)
        self.task, self.traceback, self.tries, self.lost = task, traceback, tries, lost
        if traceback:
            self.add_note(f"in the function, in its {'only try' if tries == 1 else f'try {tries}'}:\n{traceback.rstrip()}")


class BudgetReached(EphemeronError):
    """Tasks have cost what they may; those without a result are cancelled."""

    def __init__(self, cost_usd: float, budget_usd: float, *, done: int, of: int) -> None:
        super().__init__(f"${cost_usd:.6f} are spent of a budget of ${budget_usd:g}: {done} of {of} tasks are done, the rest is cancelled")
        self.cost_usd, self.done = cost_usd, done


class TableTaken(UserError):
    """Another client has changed a table of results meanwhile."""


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


class RunStopped(EphemeronError):
    """A run was stopped, and what this client still waits for has no result.

    Args:
        run_id: the run's name.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id} was stopped")
        self.run_id = run_id


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
    """No data service, sparse store or price list answers, or one that did is gone and does not come back before the deadline."""


class ServiceRefused(EphemeronError):
    """A data service does not take this token, or a sparse store has a later attempt of this client."""


class RpcError(EphemeronError):
    """A call or a stream between two processes failed."""


class RemoteError(RpcError):
    """The handler at the other end raised.

    Args:
        type_name: name of the exception's class over there; kept as `type`.
        text: its text; kept as `text`.
    """

    def __init__(self, type_name: str, text: str) -> None:
        super().__init__(f"{type_name}: {text}" if text else type_name)
        self.type = type_name
        self.text = text


class TokenRefused(RpcError):
    """The two ends do not share the same token."""


class ProtocolError(RpcError):
    """The bytes on the connection are no frame of ours, or exceed a limit. The connection is closed.

    Raised before anything is sent where it is our own frame that exceeds a limit; the connection stays then.
    """


class CallTimedOut(RpcError, TimeoutError):
    """No answer before the deadline. The other end has been told and cancels; it may have done the work."""


class ConnectionLost(RpcError, ConnectionError):
    """The connection ended before the answer came.

    Args:
        message: why.
        may_repeat: True if the request never left in full, so its handler cannot have run; kept as `may_repeat`.
    """

    def __init__(self, message: str, *, may_repeat: bool) -> None:
        super().__init__(message)
        self.may_repeat = may_repeat


class DaemonGone(PlatformError):
    """No process hosts the functions of this run, or the one that does is ending."""


class GatewayError(PlatformError):
    """The OpenFaaS gateway, or a service behind it, refused a request.

    Args:
        status: HTTP status; 0 without an answer: the request may or may not have arrived.
        text: body of the answer.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}" if status else text)
        self.status = status
        self.text = text


class RunAlreadyDriven(UserError):
    """Another client drives the run.

    Args:
        run_id: the run.
        owner: process that drives it; kept as `owner`.
    """

    def __init__(self, run_id: str, owner: str) -> None:
        super().__init__(
            f"run {run_id} is already running as {owner}; watch it with: ephemeron attach {run_id}, "
            f"or stop it with: ephemeron stop {run_id}"
        )
        self.owner = owner


class NotComputed(JobError):
    """A value is asked for of a matrix that is only planned."""


class TraceMismatch(JobError):
    """A traced model does not compute what the original computes."""


class FileVersionChanged(DatasetError):
    """A file is not the version that the metadata pins.

    Args:
        path: the file, relative to its folder or bucket.
        wanted: pinned identity (ETag or version id).
        found: its identity now; None: it is absent.
    """

    def __init__(self, path: str, wanted: str, found: str | None) -> None:
        super().__init__(f"is {found or 'absent'} now, not {wanted}", file=path)
        self.path, self.wanted, self.found = path, wanted, found


class PickleRefused(DatasetError):
    """A pickled file is damaged, or asks for more than arrays and plain containers."""


class SimulationDeadlock(EphemeronError):
    """Every task of a simulation waits for another one: no timer is left to advance the clock."""


class _Operation(Protocol):
    @property
    def stage(self) -> int: ...
    @property
    def direction(self) -> str: ...
    @property
    def micro_batch(self) -> int: ...


class StageFailed(EphemeronError):
    """A device of a pipeline failed. The pipeline has ended, with all its processes; its last checkpoint is kept.

    Args:
        message: what happened, in one line.
        device: where.
        iteration: which step, from 0.
        operation: in which pass; None: between passes, or not known.
        operator: in which operator of the model; empty: not known.
    """

    def __init__(self, message: str, *, device: str, iteration: int, operation: _Operation | None = None, operator: str = "") -> None:
        where = f"device {device}"
        if operation is not None:
            where = f"stage {operation.stage} on {where}, {operation.direction} of micro-batch {operation.micro_batch}"
        at = f", operator {operator}" if operator else ""
        super().__init__(f"{where}{at}, iteration {iteration}: {message}")
        self.message = message
        self.device = device
        self.stage = None if operation is None else operation.stage
        self.iteration = iteration
        self.operation = operation
        self.operator = operator


class MatrixError(EphemeronError):
    """A kernel cannot go on with the values of a tile. It is a `numpy.linalg.LinAlgError`, too.

    Args:
        message: what is wrong, in one line.
        kernel: the kernel's name.
        position: row or column within the tile, from 0.
        where: the task and its tiles; the runtime adds it with `at`.
    """

    def __init__(self, message: str, *, kernel: str, position: int = 0, where: str = "") -> None:
        super().__init__(f"{kernel}: {message}" + (f" ({where})" if where else ""))
        self.message, self.kernel, self.position, self.where = message, kernel, position, where

    def at(self, where: str) -> MatrixError:
        """The same error with the task and its tiles named."""
        return type(self)(self.message, kernel=self.kernel, position=self.position, where=where)

    def __reduce__(self) -> tuple[Any, ...]:
        return _matrix_error, (type(self), self.message, self.kernel, self.position, self.where)


def derive_from_numpy() -> None:
    """Makes matrix errors `numpy.linalg.LinAlgError`s, too, so that what is written for NumPy catches them.

    Linear algebra calls it when its kernels are imported: this module must not import NumPy, which CLI and functions start without.
    """
    from numpy.linalg import LinAlgError

    MatrixError.__bases__ = (EphemeronError, LinAlgError)


def _matrix_error(kind: type[MatrixError], message: str, kernel: str, position: int, where: str) -> MatrixError:
    return kind(message, kernel=kernel, position=position, where=where)


class NotPositiveDefinite(MatrixError):
    """The leading block that ends at `position` is not positive definite."""


class SingularMatrix(MatrixError):
    """The pivot at `position` is exactly zero: the matrix is singular."""


class NotHermitian(MatrixError):
    """A value is not the conjugate of its mirror image, where a Hermitian matrix is needed."""


class NotFinite(MatrixError):
    """A value is NaN or infinite."""


class NotConverged(MatrixError):
    """An iteration for eigenvalues or singular values did not converge."""
