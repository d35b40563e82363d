"""A computation of a successor that waits for its predecessor, whose result is thrown away.

The first forward and backward pass of a process takes several times as long as others: PyTorch loads and chooses kernels, starts
threads and compiles. All ranks would wait for that after each hand-off.
"""

from __future__ import annotations

import logging

from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.trainers.trainer import Trainer
from ephemeron.user_code import line_of

_log = logging.getLogger(__name__)

SPARE = 2
"""Iterations that must fit into the time that loading has taken: a successor is started early enough to load twice."""


def pays(lifecycle: InvocationLifecycle) -> bool:
    """Whether a successor that has loaded has the time for an iteration that does not count, and data that costs nothing."""
    spec = lifecycle.spec
    if spec.trainer != "torch" or spec.stages is not None or spec.flow is not None:
        return False
    return SPARE * lifecycle.timeouts.slowest_s <= lifecycle.handoff.load_s


async def warm_up(lifecycle: InvocationLifecycle, trainer: Trainer) -> None:
    """Computes an iteration that does not count."""
    invocation, spec = lifecycle.invocation, lifecycle.spec
    iteration = max(invocation.request.reached, spec.current_generation.from_iteration)
    samples = spec.timeline.batch(spec.member(invocation.rank), iteration)
    batches = spec.configuration.exchange.local_steps
    await invocation.compute(lambda: rehearse(trainer, iteration), samples=samples, batches=batches)


def rehearse(trainer: Trainer, iteration: int) -> None:
    """Computes an iteration, and restores the trainer's state bit for bit."""
    before = trainer.state()
    try:
        trainer.compute(iteration)
    except Exception as e:  # noqa: BLE001 - the iteration that counts will raise it
        _log.debug("the rehearsal of iteration %d has failed: %s", iteration, line_of(e))
    finally:
        trainer.load(*before)
