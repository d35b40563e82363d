"""Two small models to partition. Each function takes the batch size and returns the model and one batch of example inputs."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Transformer block: attention and a feed-forward network, each with its residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, words: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1), nn.Conv2d(channels, channels, 3, 1, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ConvNet(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1), nn.ReLU()]
        for level in range(3):
            stages += [Residual(width << level), nn.Conv2d(width << level, width << level + 1, 3, 2, 1), nn.ReLU()]
        self.features, self.head = nn.Sequential(*stages), nn.Linear(width << 3, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((-2, -1)))


def transformer(batch_size: int, width: int = 128, layers: int = 6, length: int = 64) -> tuple[nn.Module, torch.Tensor]:
    """Transformer of six causal blocks over 1,000 words: 1.5 million parameters."""
    model = Transformer(1000, width, layers, heads=4, length=length)
    return model, torch.randint(0, 1000, (batch_size, length))


def convnet(batch_size: int, width: int = 16, size: int = 32) -> tuple[nn.Module, torch.Tensor]:
    """Convolutional network of residual blocks at three scales over images of 32 × 32."""
    return ConvNet(width, 10), torch.randn(batch_size, 3, size, size)
