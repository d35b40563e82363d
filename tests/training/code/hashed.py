"""Softmax regression on hashed features of digits: each pixel and its brightness is one of 2^14 features."""

import torch
from torch import nn

FEATURES = 1 << 14


class Hashed(nn.Module):
    def __init__(self, sparse: bool = True, dtype: str = "float32") -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(FEATURES, 10, mode="sum", sparse=sparse, dtype=getattr(torch, dtype))
        nn.init.zeros_(self.weights.weight)
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        levels = (x * 16 / x.abs().max().clamp(min=1e-9)).round().long()
        features = (levels * 64 + torch.arange(64)) * 2_654_435_761 % FEATURES
        return self.weights(features).float() + self.bias
