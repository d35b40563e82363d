"""Tasks that hold what a replacement has to have: random generators, and files for the user."""

from __future__ import annotations

import random

import numpy as np
import torch
from programs import Tabular


class Noise(torch.nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(7)

    def forward(self, x):
        return x * (1 + 0.1 * float(self.generator.random()))


class Draws(Tabular):
    """Every kind of generator, on the task and in its model."""

    def __init__(self):
        self.held = {"numpy": np.random.default_rng(0), "old": np.random.RandomState(1), "more": [random.Random(2)]}
        self.mersenne = np.random.Generator(np.random.MT19937(5))
        self.torch = torch.Generator().manual_seed(3)

    def model(self):
        return torch.nn.Sequential(super().model(), Noise())

    def drawn(self):
        held = self.held
        found = held["numpy"].random() + held["old"].rand() + held["more"][0].random() + self.mersenne.normal()
        return 1 + 0.1 * (found + float(torch.rand((), generator=self.torch)))

    def training_step(self, model, batch):
        return super().training_step(model, batch) * self.drawn()


class DrawsAtTheEnd(Draws):
    """Draws while an update is applied, too: functions draw alike."""

    def on_step_end(self, model):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 - 0.001 * self.drawn())


class Counts(Tabular):
    """State that no checkpoint has: a number, and a model that follows the trained one."""

    def __init__(self):
        self.seen, self.same, self.rebound = 0, 3, "text"
        self.teacher = torch.nn.Linear(5, 1)

    def training_step(self, model, batch):
        self.seen += 1
        with torch.no_grad():
            self.teacher.weight.add_(1)
        return super().training_step(model, batch)


class Saves(Counts):
    def state_dict(self):
        return {"seen": self.seen, "teacher": self.teacher.state_dict()}

    def load_state_dict(self, state):
        self.seen = state["seen"]
        self.teacher.load_state_dict(state["teacher"])


class Writes(Tabular):
    """A log of all steps, and a file in a folder."""

    def on_step_end(self, model):
        with open(self.output_dir / "steps.txt", "a") as log:
            print(self.global_step, file=log)
        (self.output_dir / "more").mkdir(exist_ok=True)
        torch.save(self.global_step, self.output_dir / "more" / "last.pt")


class WritesTooMuch(Tabular):
    def on_step_end(self, model):
        (self.output_dir / "large").write_bytes(bytes(65 << 20))


class Loses(Tabular):
    """Writes into the working folder."""

    def on_step_end(self, model):
        import pathlib

        pathlib.Path("out").mkdir(exist_ok=True)
        torch.save(model.state_dict(), "out/ckpt.pt")
        torch.save(model.state_dict(), self.output_dir / "kept.pt")
