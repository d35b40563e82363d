"""Samplers and pruners of Optuna, used so that a suggestion is a function of the seed and of the trials before it.

The values of trial N are suggested in a copy of the study in memory, by a sampler that is seeded anew with seed and N, and are
then stored with the trial in one transaction. So a client that goes on suggests what the one before would have, as far as the
same trials have ended by then: with several trials at a time, in real time, their order is not determined.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ephemeron.tuning.space import Parameter
from ephemeron.tuning.study_file import StudySpec
from ephemeron.tuning.trial import recorded

if TYPE_CHECKING:
    import optuna
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, Optuna logs warnings only."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def sampler_of(spec: StudySpec, space: Sequence[Parameter], number: int) -> BaseSampler:
    """The sampler that suggests trial `number`."""
    from optuna.samplers import GridSampler, RandomSampler, TPESampler

    seed = zlib.crc32(f"{spec.seed} {number}".encode())
    if spec.sampler == "grid":
        return GridSampler({p.key: list(p.grid_values()) for p in space}, seed=spec.seed % 2**32)  # its order is one of all
    if spec.sampler == "random":
        return RandomSampler(seed=seed)
    return TPESampler(seed=seed, multivariate=True)


def pruner_of(spec: StudySpec, evaluations: int | None) -> BasePruner:
    """The pruner.

    Args:
        spec: of the study.
        evaluations: of a trial that runs to its end; None: as many as the longest that has finished, before which none is ended.
    """
    from optuna.pruners import HyperbandPruner, NopPruner, SuccessiveHalvingPruner

    p = spec.pruner
    if p.name == "none":
        return NopPruner()
    if evaluations is None:
        return _later(spec)
    if p.name == "asha":
        return SuccessiveHalvingPruner(min_resource=p.first_decision(evaluations), reduction_factor=p.reduction_factor)
    return HyperbandPruner(min_resource=p.first_decision(evaluations), max_resource=evaluations, reduction_factor=p.reduction_factor)


def compares_at(spec: StudySpec, number: int) -> bool:
    """Whether the pruner of trials that report often compares them after so many reports: 1, 3, 9, … times those before the first decision,
    with a reduction factor of 3."""
    p = spec.pruner
    times, rest = divmod(number, p.min_evaluations or 1)
    while times > 1 and times % p.reduction_factor == 0:
        times //= p.reduction_factor
    return p.name != "none" and not rest and times == 1


def _later(spec: StudySpec) -> BasePruner:
    """The pruner of trials of which it is not known how many values they report before one has finished.

    ASHA compares them after 1, 3, 9, … times `min_evaluations` reports (with a reduction factor of 3). Where that is not given, it is 1, and
    none is ended before about the square root of the most that a finished trial has reported, or once it has reported as much."""
    from optuna.pruners import BasePruner, SuccessiveHalvingPruner
    from optuna.trial import TrialState

    p = spec.pruner
    halving = SuccessiveHalvingPruner(min_resource=p.min_evaluations or 1, reduction_factor=p.reduction_factor)

    class Later(BasePruner):  # type: ignore[misc]  # Optuna may be absent
        def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
            finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            most = max((recorded(t).evaluations for t in finished), default=0)
            number = trial.last_step or 0
            if p.name == "hyperband":
                return 0 < number < most and pruner_of(spec, most).prune(study, trial)
            is_worse = halving.prune(study, trial)  # which notes its value in any case
            if p.min_evaluations is None:
                is_worse = is_worse and number < most and number * p.reduction_factor > p.first_decision(most)
            return bool(is_worse)

    return Later()


def suggest(study: optuna.Study, spec: StudySpec, space: Sequence[Parameter]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Values of the study's next trial, and what the sampler has to store with it. The study does not change."""
    import optuna

    trials: list[FrozenTrial] = study.get_trials(deepcopy=False)
    with quiet():
        copy = optuna.create_study(
            study_name=study.study_name, direction=study.direction, sampler=sampler_of(spec, space, len(trials)), pruner=study.pruner
        )
        copy.add_trials(trials)
        asked = copy.ask({p.key: p.distribution for p in space})
        frozen = copy.get_trials(deepcopy=False)[asked.number]
    return dict(asked.params), dict(frozen.system_attrs)


def begin_trial(
    study: optuna.Study, space: Sequence[Parameter], values: Mapping[str, Any], system: Mapping[str, Any], attributes: Mapping[str, Any]
) -> FrozenTrial:
    """Stores a running trial with its values and attributes, in one transaction."""
    from optuna.trial import TrialState, create_trial

    study.add_trial(
        create_trial(
            state=TrialState.RUNNING,
            params=dict(values),
            distributions={p.key: p.distribution for p in space},
            system_attrs=dict(system),
            user_attrs=dict(attributes),
        )
    )
    return study.get_trials(deepcopy=False)[-1]
