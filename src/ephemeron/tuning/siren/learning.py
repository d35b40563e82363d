"""Training of policies with PPO of Stable-Baselines3.

A policy first imitates the schedule of a dynamic programme, in noisy epochs in which the policy's own and random choices occur, too; then PPO
goes on from there. Without the imitation PPO needs far more epochs and ends further from the bound (`docs/siren.md`). The best policy of all
evaluations is kept, judged by runs whose noise is not that of the training, and compared by further ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.errors import MissingExtra
from ephemeron.training.task.decision_table import DecisionTable
from ephemeron.training.task.learned_schedule import Layer, PolicyNetwork
from ephemeron.tuning.siren.baselines import RELIABLE, SEEDS, Chooser, StaticPlan, outcome_of, static_plan
from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, scales_of
from ephemeron.tuning.siren.epoch_model import EpochCosts
from ephemeron.tuning.siren.policy import Candidate, Comparison, SavedPolicy, Training
from ephemeron.tuning.siren.schedules import CHOSEN_BY, Programmed, asked, listed, programmed

STEPS = 2_000
"""Epochs of PPO, by default."""
EVERY = 1_000
"""Epochs between evaluations."""
UNITS = 64
LOG_SPREAD = -3.0
"""Logarithm of the spread of actions around what was imitated."""
IMITATED = 60
"""Runs in which the dynamic programme is imitated, in each of `ROUNDS`."""
ROUNDS = 5
FITTING, SAMPLE = 600, 512
"""Steps of gradient descent after each round, and choices of a step."""


def _library() -> Any:
    try:
        import stable_baselines3
    except ImportError:
        raise MissingExtra("Stable-Baselines3", "siren") from None
    return stable_baselines3


def learn(
    spec: EnvironmentSpec,
    *,
    seed: int = 0,
    steps: int = STEPS,
    imitate: bool = True,
    start: Path | None = None,
    measured_runs: int = 0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[SavedPolicy, Any]:
    """A policy for an environment.

    Args:
        spec: of the environment.
        seed: of the training.
        steps: epochs of PPO.
        imitate: imitate the dynamic programme first.
        start: a saved policy's `.zip` to go on from; None: a new one.
        measured_runs: noted in the document.
        on_progress: called with a line of what is done.

    Returns:
        The policy, and the library's model of it.

    Raises:
        PlanInfeasible: no static configuration reaches the target within the budget.
        MissingExtra: the library is not installed.
    """
    import torch

    began, library = time.perf_counter(), _library()
    static = static_plan(spec)
    spec = dataclasses.replace(spec, reference_s=static.outcome.seconds)
    programme = programmed(spec, static)
    on_progress(f"solved the dynamic programme: no schedule takes less than {programme.least_s:.4g} s")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        env = Environment(spec)
        options: dict[str, Any] = {
            "learning_rate": 5e-5 if imitate else 3e-4,
            "n_steps": min(1024, max(64, steps)),
            "batch_size": min(256, max(64, steps)),
            "n_epochs": 5,
            "gamma": 1.0,
            "gae_lambda": 0.95,
            "clip_range": 0.1,
            "seed": seed,
            "device": "cpu",
        }
        if start is None:
            shape = {"net_arch": [UNITS, UNITS], "log_std_init": LOG_SPREAD if imitate else -1.0}
            model = library.PPO("MlpPolicy", env, policy_kwargs=shape, **options)
        else:
            model = library.PPO.load(start, env=env, device="cpu", seed=seed)
        imitated = _imitate(model, Environment(spec), programme.table, seed) if imitate else 0
        if imitated:
            on_progress(f"imitated {imitated} epochs of the dynamic programme")
        best, rewards = _trained(model, spec, steps, on_progress)
    finally:
        torch.set_num_threads(threads)
    return SavedPolicy(
        environment=spec,
        network=best,
        training=Training(
            seed=seed,
            steps=steps,
            imitated=imitated,
            seconds=round(time.perf_counter() - began, 1),
            rewards=tuple(rewards),
            measured_runs=measured_runs,
        ),
        table=programme.table,
        fixed=programme.fixed,
        comparison=compare(spec, best, static, programme),
    ), model


def compare(spec: EnvironmentSpec, network: PolicyNetwork | None, static: StaticPlan, programme: Programmed) -> Comparison:
    """All schedules in the same noisy runs, with the bounds.

    Args:
        spec: of the environment.
        network: of a policy; None: there is none.
        static, programme: see `programmed`.
    """
    schedules: dict[str, Chooser] = {"programme": asked(programme.table), "list": listed(spec, programme.fixed)}
    if network is not None:
        schedules = {"network": chooser(spec, network)} | schedules
    again_s = static.outcome.seconds
    outcomes = {"static": static.outcome} | {name: outcome_of(spec, choose) for name, choose in schedules.items()}
    return Comparison(
        static_workers=static.workers,
        static_memory_mb=static.memory_mb,
        bound_s=programme.bound_s,
        least_s=programme.least_s,
        seeds=len(SEEDS),
        candidates=tuple(
            Candidate(name=name, seconds=o.counted_s(again_s), reached=o.reached)  # type: ignore[arg-type]
            for name, o in outcomes.items()
        ),
    )


def chooser(spec: EnvironmentSpec, network: PolicyNetwork) -> Callable[[Environment], EpochCosts]:
    """The choices of a network."""
    scales = scales_of(spec, spec.model().table)

    def choose(env: Environment) -> EpochCosts:
        return env.chosen(*spec.bounds.configuration(network.act(scales.observation(env.state))))

    return choose


def network_of(model: Any) -> PolicyNetwork:
    """The mean of a model's policy as matrices."""
    parts = [m for m in [*model.policy.mlp_extractor.policy_net, model.policy.action_net] if hasattr(m, "weight")]
    return PolicyNetwork(
        layers=tuple(
            Layer(
                weights=tuple(tuple(row) for row in part.weight.detach().double().tolist()),
                bias=tuple(part.bias.detach().double().tolist()),
            )
            for part in parts
        )
    )


def _imitate(model: Any, env: Environment, table: DecisionTable, seed: int) -> int:
    """Fits the policy's mean to the dynamic programme's choices, and its critic to what they earn; returns the number of choices.

    In the first round, epochs are those of the programme with a share of random choices; later they are the policy's own.
    """
    import torch

    random, teacher = np.random.default_rng(seed), asked(table)
    seen: list[NDArray[np.float32]] = []
    wanted: list[NDArray[np.float64]] = []
    earned: list[float] = []
    policy = model.policy
    heads = [policy.mlp_extractor.policy_net, policy.action_net, policy.mlp_extractor.value_net, policy.value_net]
    parameters = [p for head in heads for p in head.parameters()]
    for turn in range(ROUNDS):
        own = chooser(env.description, network_of(model))
        for episode in range(IMITATED):
            observation, _ = env.reset(seed=int(random.integers(2**31)))
            over, astray, rewards = False, random.random() < 0.5, list[float]()
            while not over:
                best = teacher(env)
                seen.append(observation)
                wanted.append(env.description.bounds.action(best.workers, best.memory_mb))
                taken = best if turn == 0 or episode % 2 else own(env)
                if astray and random.random() < 0.15:
                    taken = env.chosen(*table.choices[int(random.integers(len(table.choices)))])
                observation, reward, over, _, _ = env.advance(taken)
                rewards.append(reward)
            earned += np.cumsum(rewards[::-1])[::-1].tolist()
        inputs = torch.as_tensor(np.asarray(seen), dtype=torch.float32)
        targets = torch.as_tensor(np.asarray(wanted), dtype=torch.float32)
        returns = torch.as_tensor(np.asarray(earned), dtype=torch.float32)
        optimizer = torch.optim.Adam(parameters, lr=3e-3)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, FITTING)
        for _ in range(FITTING):
            some = torch.as_tensor(random.integers(len(seen), size=SAMPLE))
            mean = policy.action_net(policy.mlp_extractor.policy_net(inputs[some]))
            value = policy.value_net(policy.mlp_extractor.value_net(inputs[some])).flatten()
            missed = torch.nn.functional.smooth_l1_loss(mean, targets[some], beta=0.1)
            loss = missed + 0.1 * (value - returns[some]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
    return len(seen)


def _trained(model: Any, spec: EnvironmentSpec, steps: int, on_progress: Callable[[str], None]) -> tuple[PolicyNetwork, list[float]]:
    """Trains with PPO; returns the best network, and the mean total rewards of all evaluations."""
    best, best_key, rewards = None, (False, -1.0), []
    every = min(EVERY, steps) or 1
    for done in range(0, steps + 1, every):
        if done:
            model.learn(every, reset_num_timesteps=False)
        network = network_of(model)
        found = outcome_of(spec, chooser(spec, network), CHOSEN_BY)
        total = spec.bonus * (2 * found.reached - 1) - float(np.mean(found.runs)) / spec.reference_s
        rewards.append(round(total, 4))
        good = found.reached >= RELIABLE
        key = (good, -found.counted_s(spec.reference_s) if good else found.reached)
        on_progress(f"after {done} epochs: {found.reached:.0%} reach the target, {found.seconds:.4g} s")
        if best is None or key > best_key:
            best, best_key = network, key
    assert best is not None
    return best, rewards
