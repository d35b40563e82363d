"""Samples of the scripts."""

import torch
from torch.utils.data import Dataset


class Points(Dataset):
    """Points in three clusters; noisy ones are moved at random whenever they are read."""

    def __init__(self, count, seed=3, noisy=False):
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(3, (count,), generator=generator)
        self.inputs = torch.randn(count, 6, generator=generator) + 2 * torch.nn.functional.one_hot(self.targets, 6)
        self.noisy = noisy

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        noise = 0.1 * torch.randn(6) if self.noisy else 0
        return self.inputs[i] + noise, self.targets[i]
