"""Training with stale gradients, many runs at once, independent of the worker code. For `benchmarks.hap_convergence`.

A *version* is the state after so many merged updates. In iteration t rank r computes its gradient at version t − s, where its
staleness s is 0 or 1 under HAP (FasDL 3.2.2: aggregators 0, the others 1), s for every rank under SSP(s) at its bound, and random
under ASP. All gradients of the iteration, weighted by samples, make version t + 1. Runs are rows of tensors: parameters are
(runs, elements), models are grouped convolutions and batched products, and optimisers are written out, so that nothing here
shares code with what it checks but the arithmetic of which sample is in which batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ephemeron.data import DataSpec, Sampler, assign, load, plan_split

Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run."""

    seed: int = 0
    sync: str = "hap"
    """`bsp`, `hap`, `ssp:N` or `asp`."""
    workers: int = 4
    aggregators: int = 2
    batch: int = 16
    nonaggregator_batch: int = 16
    epochs: int = 6
    model: str = "cnn"
    """`cnn` of `examples/digits`, or `mlp` with 64 hidden units."""
    optimizer: str = "sgd"
    """`sgd`, `nesterov`, `adam` or `adamw`."""
    lr: float = 0.1
    momentum: float = 0.9
    remedy: str = "none"
    """Names of `REMEDIES`, joined by `+`."""

    def staleness(self, rank: int, iteration: int) -> int:
        """Versions that the rank's parameters lack, but for the first iterations."""
        if self.sync == "bsp":
            return 0
        if self.sync == "hap":
            return int(rank >= self.aggregators)
        if self.sync == "asp":
            return int(np.random.default_rng([self.seed, rank, iteration]).integers(0, ASP_MOST + 1))
        return int(self.sync.partition(":")[2])


ASP_MOST = 2
"""Staleness under ASP is uniform in 0 … this: runs on the simulated platform with 4 and 8 workers show 0, 1 and seldom 2."""
SPIKE = 2.0
"""Largest norm of a merged gradient, in moving averages of it."""
REMEDIES = {
    "none": "gradients as they come",
    "momentum-prediction": "gradient at w − lr·(μ + … + μ^s)·v; for Adam at w − s·lr·m̂/(√v̂ + ε) (SpecTrain, XPipe)",
    "local": "gradient after s provisional optimiser steps with the rank's own gradients that are not merged yet (OD-SGD)",
    "scale": "stale gradients × 1/(1 + s) (staleness-aware SGD, Zhang et al. 2016)",
    "lr": "learning rate / (1 + mean s)",
    "low-momentum": "momentum lowered by the momentum that staleness implies (Mitliagkas et al. 2016)",
    "dc-asgd": "g + λ·g²·(w − w_stale), λ adaptive (DC-ASGD, Zheng et al. 2017)",
    "clip": "merged gradient clipped to norm 1",
    "spike": "merged gradient clipped to twice the moving average of its norm (adaptive clipping, as ZClip and AutoClip)",
    "warmup": "learning rate rises linearly over the first epoch",
}


# -- models over rows of parameters ---------------------------------------------------------------------------


def shapes_of(model: str) -> Shapes:
    """Names and shapes of the parameters, in the order of `model.parameters()`."""
    return [(name, tuple(p.shape)) for name, p in built(model, 0).named_parameters()]


def built(model: str, seed: int) -> nn.Module:
    """The module with its initial weights."""
    torch.manual_seed(seed % 2**64)
    if model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.0), nn.Linear(64, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def forward(model: str, theta: Tensor, shapes: Shapes, inputs: Tensor) -> Tensor:
    """Scores of each row's model on each row's batch: (rows, elements), (rows, batch, 1, 8, 8) → (rows, batch, classes)."""
    rows, batch = inputs.shape[:2]
    parts, start = [], 0
    for _, shape in shapes:
        size = math.prod(shape)
        parts.append(theta[:, start : start + size].reshape(rows, *shape))
        start += size
    if model == "mlp":
        x = inputs.reshape(rows, batch, 64)
        w1, b1, w2, b2 = parts
        x = torch.tanh(torch.baddbmm(b1[:, None], x, w1.transpose(1, 2)))
        return torch.baddbmm(b2[:, None], x, w2.transpose(1, 2))
    c1, d1, c2, d2, w1, b1, w2, b2 = parts
    x = inputs.reshape(rows, batch, 8, 8).transpose(0, 1)
    x = torch.relu(functional.conv2d(x, c1.flatten(0, 1), d1.flatten(), padding=1, groups=rows))
    x = torch.relu(functional.conv2d(x, c2.flatten(0, 1), d2.flatten(), padding=1, groups=rows))
    x = functional.max_pool2d(x, 2).reshape(batch, rows, 512).transpose(0, 1)
    x = torch.relu(torch.baddbmm(b1[:, None], x, w1.transpose(1, 2)))
    return torch.baddbmm(b2[:, None], x, w2.transpose(1, 2))


def gradient_sums(model: str, theta: Tensor, shapes: Shapes, inputs: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over each row's batch of the gradients of the cross entropy, and of the losses."""
    theta = theta.detach().requires_grad_()
    scores = forward(model, theta, shapes, inputs)
    losses = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    sums = (losses * mask).sum(1)
    (gradient,) = torch.autograd.grad(sums.sum(), theta)
    return gradient, sums.detach()


# -- optimisers over rows of parameters -----------------------------------------------------------------------


@dataclass
class State:
    """Parameters and optimiser state of rows."""

    w: Tensor
    m: Tensor
    """Momentum buffer, or first moment."""
    v: Tensor
    """Second moment."""
    steps: int

    def rows(self, index: Tensor) -> State:
        return State(self.w[index], self.m[index], self.v[index], self.steps)


@dataclass
class Optimizer:
    """Hyperparameters by row, (rows, 1)."""

    kind: str
    lr: Tensor
    momentum: Tensor

    def rows(self, index: Tensor) -> Optimizer:
        return Optimizer(self.kind, self.lr[index], self.momentum[index])

    def step(self, s: State, gradient: Tensor) -> State:
        """The state after one step. Defaults of `torch.optim`; AdamW decays by 0.01."""
        if self.kind in ("sgd", "nesterov"):
            m = self.momentum * s.m + gradient
            direction = gradient + self.momentum * m if self.kind == "nesterov" else m
            return State(s.w - self.lr * direction, m, s.v, s.steps + 1)
        t = s.steps + 1
        m, v = 0.9 * s.m + 0.1 * gradient, 0.999 * s.v + 0.001 * gradient.square()
        w = s.w * (1 - 0.01 * self.lr) if self.kind == "adamw" else s.w
        return State(w - self.lr / (1 - 0.9**t) * m / (v.sqrt() / math.sqrt(1 - 0.999**t) + 1e-8), m, v, t)

    def predicted(self, s: State, steps: int) -> Tensor:
        """Parameters after some steps that go on as the momentum does."""
        if self.kind in ("sgd", "nesterov"):
            factor = sum(self.momentum**i for i in range(1, steps + 1))
            return s.w - self.lr * factor * s.m
        if s.steps == 0:
            return s.w
        m, v = s.m / (1 - 0.9**s.steps), s.v / (1 - 0.999**s.steps)
        return s.w - steps * self.lr * m / (v.sqrt() + 1e-8)


# -- runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """What one run showed, by epoch."""

    setting: Setting
    accuracy: list[float]
    loss: list[float]
    """Mean training loss."""
    weights: np.ndarray
    """Parameters at the end, one vector."""


@dataclass
class _Data:
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    index: Tensor
    """(iterations of the run, ranks, batch): positions of samples."""
    mask: Tensor
    iterations: int
    """Per epoch."""


def _data(s: Setting) -> _Data:
    data = load(DataSpec(), seed=s.seed)
    batches = [s.batch if r < s.aggregators else s.nonaggregator_batch for r in range(s.workers)]
    split = plan_split(len(data.train), batches)
    owned = assign(len(data.train), split, s.seed)
    total = split.iterations * s.epochs
    index = np.zeros((total, s.workers, max(batches)), dtype=np.int64)
    mask = np.zeros(index.shape, dtype=np.float32)
    for rank in range(s.workers):
        sampler = Sampler(split, rank, s.seed)
        for t in range(total):
            chosen = owned[rank][sampler.batch(t)]
            index[t, rank, : len(chosen)], mask[t, rank, : len(chosen)] = chosen, 1
    tensors = (torch.from_numpy(a) for a in (data.train.inputs, data.train.targets, data.test.inputs, data.test.targets))
    return _Data(*tensors, torch.from_numpy(index), torch.from_numpy(mask), split.iterations)


def same_bank(s: Setting) -> tuple[object, ...]:
    """What runs must share to be computed together."""
    return (
        s.workers,
        s.batch,
        s.nonaggregator_batch,
        s.batch != s.nonaggregator_batch and s.aggregators,
        s.epochs,
        s.model,
        s.optimizer,
        s.remedy,
    )


def train(settings: Sequence[Setting], each: Callable[[], None] = lambda: None) -> list[Curve]:
    """Trains runs that differ in seed, protocol, K, learning rate and momentum only.

    Args:
        settings: of the runs.
        each: called after every epoch.
    """
    s0, n, w = settings[0], len(settings), settings[0].workers
    assert len({same_bank(s) for s in settings}) == 1, "runs of one bank share everything else"
    kind, remedies = s0.optimizer, set(s0.remedy.split("+"))
    assert remedies <= REMEDIES.keys(), remedies
    shapes = shapes_of(s0.model)
    seeds = sorted({s.seed for s in settings})
    known = {seed: _data(next(s for s in settings if s.seed == seed)) for seed in seeds}
    data = [known[s.seed] for s in settings]
    per_epoch = data[0].iterations
    w0 = torch.stack([nn.utils.parameters_to_vector(built(s.model, s.seed).parameters()).detach() for s in settings])
    base = torch.tensor([[s.lr] for s in settings])
    momentum = torch.tensor([[s.momentum] for s in settings])
    lags = torch.tensor([[[min(t, s.staleness(r, t)) for r in range(w)] for s in settings] for t in range(per_epoch * s0.epochs)])
    mean_lag = lags[len(lags) // 2 :].float().mean((0, 2))[:, None]
    lr = base / (1 + mean_lag) if "lr" in remedies else base
    if "low-momentum" in remedies:
        implied = mean_lag / (1 + mean_lag)
        momentum = ((momentum - implied) / (1 - implied)).clamp(min=0)
    predicts = bool(remedies & {"momentum-prediction", "local"})
    most = int(lags.max())
    second = torch.zeros_like(w0) if kind in ("adam", "adamw") else w0[:, :0]
    states = [State(w0, torch.zeros_like(w0), second, 0)]
    own: list[Tensor] = []
    square = torch.zeros_like(w0)
    usual = torch.zeros(n, 1)
    losses, accuracy, loss_sum = [], [], torch.zeros(n)
    row, rank = (i.flatten() for i in torch.meshgrid(torch.arange(n), torch.arange(w), indexing="ij"))
    order = {seed: i for i, seed in enumerate(seeds)}
    which = torch.tensor([order[s.seed] for s in settings])
    inputs = torch.stack([known[seed].inputs for seed in seeds])
    targets = torch.stack([known[seed].targets for seed in seeds])
    for t in range(per_epoch * s0.epochs):
        factor = min(1.0, (t + 1) / per_epoch) if "warmup" in remedies else 1.0
        optimizer = Optimizer(kind, lr * factor, momentum)
        lag = lags[t][row, rank]
        theta = torch.empty(n * w, w0.shape[1])
        for s in lag.unique().tolist():
            at = (lag == s).nonzero().flatten()
            if not (s and predicts):
                theta[at] = states[-1 - s].w[row[at]]
                continue
            state, there = states[-1 - s].rows(row[at]), optimizer.rows(row[at])
            if "momentum-prediction" in remedies:
                state.w = there.predicted(state, s)
            for back in range(s, 0, -1) if "local" in remedies else ():
                state = there.step(state, own[-back][at])
            theta[at] = state.w
        index = torch.stack([d.index[t] for d in data]).flatten(0, 1)
        mask = torch.stack([d.mask[t] for d in data]).flatten(0, 1)
        x, y = inputs[which[row][:, None], index], targets[which[row][:, None], index]
        sums, loss = gradient_sums(s0.model, theta, shapes, x, y, mask)
        samples = mask.sum(1, keepdim=True)
        own = [*own[-most:], sums / samples.clamp(min=1)] if most else []
        stale = lag[:, None]
        if "scale" in remedies:
            sums = sums / (1 + stale)
        if "dc-asgd" in remedies:
            mean = sums / samples.clamp(min=1)
            square = 0.95 * square + 0.05 * mean.square().view(n, w, -1).mean(1)
            moved = states[-1].w[row] - theta
            sums = sums + samples * 2.0 * mean.square() * moved / (square[row] + 1e-7).sqrt()
        merged = sums.view(n, w, -1).sum(1) / samples.view(n, w, 1).sum(1)
        if "spike" in remedies:
            norm = merged.norm(dim=1, keepdim=True)
            usual = norm if t == 0 else usual
            merged = merged * (SPIKE * usual / norm.clamp(min=1e-12)).clamp(max=1.0)
            usual = 0.9 * usual + 0.1 * merged.norm(dim=1, keepdim=True)
        if "clip" in remedies:
            merged = merged / merged.norm(dim=1, keepdim=True).clamp(min=1.0)
        states = [*states[-most:], optimizer.step(states[-1], merged)] if most else [optimizer.step(states[-1], merged)]
        loss_sum += loss.view(n, w).sum(1)
        if (t + 1) % per_epoch == 0:
            accuracy.append(_accuracy(s0.model, states[-1].w, shapes, [known[s] for s in seeds], which))
            losses.append(loss_sum / len(data[0].targets))
            loss_sum = torch.zeros(n)
            each()
    return [
        Curve(s, [float(a[i]) for a in accuracy], [float(a[i]) for a in losses], states[-1].w[i].numpy()) for i, s in enumerate(settings)
    ]


def _accuracy(model: str, w: Tensor, shapes: Shapes, data: Sequence[_Data], which: Tensor) -> Tensor:
    found = torch.empty(len(w))
    with torch.no_grad():
        for i, d in enumerate(data):
            rows = (which == i).nonzero().flatten()
            x = d.test_inputs[None].expand(len(rows), *d.test_inputs.shape)
            right = forward(model, w[rows], shapes, x).argmax(-1) == d.test_targets
            found[rows] = right.float().mean(1)
    return found
