"""Training of policies with PPO of Stable-Baselines3.

A policy first imitates the schedule of the dynamic programme, in noisy epochs in which the policy's own and random choices occur, too; then PPO
goes on from there. Without the imitation PPO needs far more epochs and ends further from the bound (`docs/siren.md`). The best policy of all
evaluations is kept, judged by runs whose noise is not that of the training, and compared by further ones.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.errors import MissingExtra
from ephemeron.training.task.learned_schedule import Layer, PolicyNetwork
from ephemeron.tuning.siren.baselines import SEEDS, Outcome, outcome_of, static_plan
from ephemeron.tuning.siren.dynamic_programme import DynamicProgramme
from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, scales_of
from ephemeron.tuning.siren.epoch_model import EpochCosts
from ephemeron.tuning.siren.policy import Comparison, SavedPolicy, Training, finite

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
CHOSEN_BY = tuple(range(2000, 2060))
"""Noisy runs by which the best policy of a training is chosen."""
TRIED = 3
"""Margins with which it is imitated, at most."""
MARGINS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2)
"""Shares of the budget that the dynamic programme's schedule may keep."""


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
    programme, judged = schedule(spec)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        env = Environment(spec)
        options: dict[str, Any] = {
            "learning_rate": 5e-5 if imitate else 3e-4, "n_steps": min(1024, max(64, steps)), "batch_size": min(256, max(64, steps)), "n_epochs": 5, "gamma": 1.0, "gae_lambda": 0.95,
            "clip_range": 0.1, "seed": seed, "device": "cpu",
        }  # fmt: skip
        if start is None:
            shape = {"net_arch": [UNITS, UNITS], "log_std_init": LOG_SPREAD if imitate else -1.0}
            model = library.PPO("MlpPolicy", env, policy_kwargs=shape, **options)
        else:
            model = library.PPO.load(start, env=env, device="cpu", seed=seed)
        imitated = _imitated(model, spec, programme, seed, on_progress) if imitate else 0
        best, rewards = _trained(model, spec, steps, on_progress)
    finally:
        torch.set_num_threads(threads)
    return SavedPolicy(
        environment=spec, network=best,
        training=Training(
            seed=seed, steps=steps, imitated=imitated, seconds=round(time.perf_counter() - began, 1), rewards=tuple(rewards),
            measured_runs=measured_runs,
        ),
        comparison=compare(spec, best, programme, judged),
    ), model  # fmt: skip


def schedule(spec: EnvironmentSpec) -> tuple[DynamicProgramme, Outcome]:
    """The dynamic programme with the least margin with which all noisy runs keep the budget, and those runs."""
    tried, programme = [], DynamicProgramme(spec)
    for programme.margin in MARGINS:
        tried.append((programme.margin, outcome_of(spec, programme.choose, CHOSEN_BY)))
        if tried[-1][1].reached == 1:
            break
    programme.margin, found = max(tried, key=lambda t: (t[1].reached, -t[1].seconds))
    return programme, found


def compare(
    spec: EnvironmentSpec,
    network: PolicyNetwork,
    programme: DynamicProgramme | None = None,
    judged: Outcome | None = None,
) -> Comparison:
    """A policy beside the best static configuration, the dynamic programme's schedule and the bound."""
    if programme is None or judged is None:
        programme, judged = schedule(spec)
    static, learned = static_plan(spec), outcome_of(spec, chooser(spec, network))
    judged = outcome_of(spec, programme.choose)
    return Comparison(
        static_workers=static.workers, static_memory_mb=static.memory_mb, static_s=static.outcome.seconds,
        learned_s=finite(learned.seconds), learned_reached=learned.reached, programme_s=finite(judged.seconds),
        programme_reached=judged.reached, bound_s=finite(programme.bound_s), seeds=len(SEEDS),
    )  # fmt: skip


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


def _imitated(
    model: Any, spec: EnvironmentSpec, programme: DynamicProgramme, seed: int, on_progress: Callable[[str], None]
) -> int:
    """Imitates the dynamic programme, with larger margins until the policy keeps the budget in all noisy runs; returns the number of choices.

    If it does not with any margin, the model has the best of them.
    """
    imitated, states = 0, []
    for margin in [m for m in MARGINS if m >= programme.margin][:TRIED]:
        programme.margin = margin
        imitated += _imitate(model, Environment(spec), programme, seed)
        found = outcome_of(spec, chooser(spec, network_of(model)), CHOSEN_BY)
        on_progress(f"imitated {imitated} epochs of the dynamic programme, which keeps {margin:.0%} of the budget")
        states.append(((found.reached, -found.seconds), copy.deepcopy(model.policy.state_dict())))
        if found.reached == 1:
            break
    model.policy.load_state_dict(max(states, key=lambda s: s[0])[1])
    return imitated


def _imitate(model: Any, env: Environment, programme: DynamicProgramme, seed: int) -> int:
    """Fits the policy's mean to the dynamic programme's choices, and its critic to what they earn; returns the number of choices.

    In the first round, epochs are those of the programme with a share of random choices; later they are the policy's own.
    """
    import torch

    random = np.random.default_rng(seed)
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
                best = programme.choose(env)
                seen.append(observation)
                wanted.append(env.description.bounds.action(best.workers, best.memory_mb))
                taken = best if turn == 0 or episode % 2 else own(env)
                if astray and random.random() < 0.15:
                    taken = programme.choices[int(random.integers(len(programme.choices)))]
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


def _trained(
    model: Any, spec: EnvironmentSpec, steps: int, on_progress: Callable[[str], None]
) -> tuple[PolicyNetwork, list[float]]:
    """Trains with PPO; returns the best network, and the mean total rewards of all evaluations."""
    best, best_key, rewards = None, (-1.0, 0.0), []
    every = min(EVERY, steps) or 1
    for done in range(0, steps + 1, every):
        if done:
            model.learn(every, reset_num_timesteps=False)
        network = network_of(model)
        found = outcome_of(spec, chooser(spec, network), CHOSEN_BY)
        total = spec.bonus * (2 * found.reached - 1) - float(np.mean(found.runs)) / spec.reference_s
        rewards.append(round(total, 4))
        key = (found.reached, -found.seconds)
        on_progress(f"after {done} epochs: {found.reached:.0%} reach the target, {found.seconds:.4g} s")
        if best is None or key > best_key:
            best, best_key = network, key
    assert best is not None
    return best, rewards
