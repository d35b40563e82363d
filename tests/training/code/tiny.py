"""Models for end-to-end tests."""

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn


def mlp(hidden: int = 16, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 10))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def heavy(megabytes: int) -> nn.Module:
    """A model that takes memory only when it trains."""

    class Heavy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 2:
                self.ballast = [np.ones(2**17) for _ in range(megabytes)]
            return self.inner(x)

    return Heavy()


class _Gated(nn.Sequential):
    """Trains no further than so many batches in each process until a file exists, and pauses before each later one for the seconds that it has."""

    def __init__(self, gate: str, passes: int, layers: nn.Sequential) -> None:
        super().__init__(*layers)
        self.gate, self.passes, self.calls = gate, passes, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.training and self.calls > self.passes:
            while not os.path.exists(self.gate):
                time.sleep(0.01)
            time.sleep(float(Path(self.gate).read_text() or 0))
        return super().forward(x)


def gated(gate: str, passes: int, **options: float) -> nn.Module:
    """`mlp`, at a gate: see `gates` of the tests."""
    return _Gated(gate, passes, mlp(**options))


class _Freezing(nn.Sequential):
    """The first process that comes to its fifth batch stops itself; one whose model is made after that trains when that one has been woken."""

    def __init__(self, folder: str, layers: nn.Sequential) -> None:
        super().__init__(*layers)
        self.folder, self.calls = folder, 0
        self.replaces = not os.path.exists(f"{folder}/freeze")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 5 and not self.replaces:
            with contextlib.suppress(FileNotFoundError):  # another one was first
                os.rename(f"{self.folder}/freeze", f"{self.folder}/frozen-{os.getpid()}")
                os.kill(os.getpid(), signal.SIGSTOP)
                Path(self.folder, "woken").touch()
        while self.replaces and not os.path.exists(f"{self.folder}/woken"):
            time.sleep(0.01)
        return super().forward(x)


def freezing(folder: str, **options: float) -> nn.Module:
    """`mlp` in functions of which one freezes, if `folder` has a file `freeze`."""
    return _Freezing(folder, mlp(**options))


def failing() -> nn.Module:
    """A model whose third forward pass raises."""

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 3:
                raise ValueError("no luck today")
            return self.inner(x)

    return Failing()


def wide_input() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def tied() -> nn.Module:
    """A layer that is used at both ends."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.inner(torch.tanh(self.first(x.flatten(1)))))
            return self.last(torch.tanh(self.inner(x)))

    return Tied()


def partly(hidden: int) -> nn.Module:
    """A layer that takes part in every third forward pass."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(64, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 10)
            self.register_buffer("passes", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += self.training
            x = torch.tanh(self.first(x.flatten(1)))
            return self.last(x if self.passes % 3 else torch.tanh(self.inner(x)))

    return Partly()


def bulky(width: int, layers: int) -> nn.Module:
    """Many parameters and little to compute: a batch of one row of them."""
    middle = [m for _ in range(layers) for m in (nn.Linear(width, width, bias=False), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *middle, nn.Linear(width, 10))


class _Counted(nn.Module):
    """Becomes NaN after so many forward passes in training."""

    def __init__(self, passes: int, grad_only: bool, hidden: int = 16) -> None:
        super().__init__()
        self.inner, self.grad_only = mlp(hidden), grad_only
        self.register_buffer("left", torch.tensor(passes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        if self.training:
            self.left -= 1
            if self.left < 0:
                out = out + (_NanGradient.apply(out) if self.grad_only else out * float("nan"))
        return out


class _NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 0

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * float("nan")


def nan_after(passes: int, grad_only: bool = False, hidden: int = 16) -> nn.Module:
    """A model whose loss, or only its gradients, are NaN from some iteration on."""
    return _Counted(passes, grad_only, hidden)


def sequences(samples: int = 48, length: int = 6, words: int = 6) -> torch.utils.data.Dataset:
    """Tokens, and the tokens that follow them."""
    tokens = torch.randint(words, (samples, length + 1), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])


def words_model(words: int = 6) -> nn.Module:
    """Scores of the next word, (B, T, V), as language models give them."""
    return nn.Sequential(nn.Embedding(words, 8), nn.Linear(8, words))


def words_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class _TrainOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise RuntimeError("only for training")
        return self.inner(x)


def train_only() -> nn.Module:
    return _TrainOnly()


def spectral(filtered: bool = False) -> nn.Module:
    """Complex numbers between two layers; with `filtered`, a complex parameter too."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 16), nn.Linear(4, 10)
            self.filter = nn.ParameterList([torch.ones(4, dtype=torch.complex64)] * filtered)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(torch.fft.fft(torch.tanh(self.first(x.flatten(1))), n=4))
            for factor in self.filter:
                x = x * factor
            return self.last(torch.fft.ifft(x).real.to(self.last.weight.dtype))

    return Spectral()


class _Tied(nn.Module):
    """The weight of the last layer is that of the embedding, as in GPT-2."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = (nn.Embedding(words, width), nn.Linear(width, width), nn.Linear(width, words, bias=False))
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)), persistent=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x) * self.scale
        causal = self.mask[: x.shape[1], : x.shape[1]] / self.mask[: x.shape[1], : x.shape[1]].sum(1, keepdim=True)
        return self.head(h + torch.tanh(self.mix(causal @ h)))


def gpt_like(words: int = 6, width: int = 8) -> nn.Module:
    return _Tied(words, width)


def gpt_like_bf16() -> nn.Module:
    return _Tied(6, 8).to(torch.bfloat16)


class _Branching(nn.Module):
    """An expert that sees few samples, so that most batches have none for it, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.expert = nn.Linear(64, 10), nn.Linear(64, 10)
        self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(64, 10).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        out = self.common(x) + self.frozen(x)
        chosen = (x[:, 20] > 0.9).nonzero().flatten()
        return out.index_add(0, chosen, self.expert(x[chosen])) if len(chosen) else out


def branching() -> nn.Module:
    return _Branching()


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(64, 16), nn.Linear(16, 10), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1))))


def unused() -> nn.Module:
    return _Unused()
