"""The daemon of a run on this machine starts while the command still imports what the run needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ephemeron.errors import EphemeronError
from ephemeron.training.job import Configuration, load_job
from ephemeron.training.job.run_options import merged, nested
from ephemeron.training.planner import EXPLICIT


@contextlib.contextmanager
def head_start(job: str, flags: Mapping[str, object]) -> Iterator[None]:
    """Inside, an early daemon is starting if the run is to be on this machine and is not planned first.

    What a task or a script says itself is not known yet; its daemon starts if the options say how to run. Mistakes in the job are
    left to those who report them.

    Args:
        job: the argument of the command.
        flags: options of a run by dotted names.
    """
    with contextlib.ExitStack() as stack:
        wanted = _wanted(job, flags)
        if wanted is not None:
            from ephemeron.communication.channels import public_address
            from ephemeron.functions.early_daemon import early_daemon
            from ephemeron.functions.passed_on import daemon_environment

            _, secrets = public_address(wanted.channel)
            stack.enter_context(early_daemon(daemon_environment(secrets)))
        yield


def _wanted(job: str, flags: Mapping[str, object]) -> Configuration | None:
    """The configuration as far as it is known; None: nothing is to be started here in advance."""
    with contextlib.suppress(EphemeronError, OSError):
        from ephemeron.config.typed import build

        found = load_job(Path(job)) if Path(job).suffix in (".toml", ".json") else None
        if found is not None and found.sparse is not None:
            return None  # its functions have other imports
        own = {} if found is None else found.run
        given = merged(own, {name: value for name, value in flags.items() if value is not None})
        c = build(Configuration, nested(given), where="configuration")
        planned = not c.regions.given and not any(name in given for name in EXPLICIT)
        alone = c.regions.given or c.channel == "parameter_server" or c.pattern == "parameter-server"
        return c if c.platform == "local" and not planned and not alone else None
    return None
