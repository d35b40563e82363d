"""Twenty small models, each with what makes its kind hard to take apart. Examples and benchmarks may use them too.

Every entry of `MODELS` makes a fresh model and an example batch; seeds are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Example:
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def image(channels: int = 3, size: int = 8) -> tuple[Tensor]:
    return (torch.randn(BATCH, channels, size, size),)


def tokens(length: int = 6, words: int = 20) -> Tensor:
    return torch.randint(0, words, (BATCH, length))


def conv_bn(i: int, o: int, k: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, k, stride, dilation * (k // 2), dilation, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class BasicBlock(nn.Module):
    def __init__(self, i: int, o: int, stride: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv_bn(i, o, stride=stride), nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.bn2, self.relu, self.dropout = nn.BatchNorm2d(o), nn.ReLU(inplace=True), nn.Dropout2d(dropout)
        self.shortcut = nn.Conv2d(i, o, 1, stride, bias=False) if i != o else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.dropout(self.conv1(x))))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = conv_bn(3, width)
        self.blocks = nn.ModuleList(
            [BasicBlock(width, width, 1, dropout), BasicBlock(width, 2 * width, 2, dropout), BasicBlock(2 * width, 2 * width, 1, dropout)]
        )
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Long skips, a branch on shapes, a pad."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = conv_bn(3, 4), conv_bn(4, 8), conv_bn(8, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.dropout = nn.Dropout2d(0.2)
        self.merge2, self.merge1, self.out = conv_bn(12, 8), conv_bn(12, 4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.dropout(self.bottom(F.max_pool2d(b, 2)))
        u = self.up(c)
        if u.shape[-2:] != b.shape[-2:]:
            u = F.pad(u, (0, b.shape[-1] - u.shape[-1], 0, b.shape[-2] - u.shape[-2]))
        d = self.merge2(torch.cat([u, b], 1))
        e = F.interpolate(d, size=a.shape[-2:], mode="nearest")
        return self.out(self.merge1(torch.cat([e, a], 1)))


class DeepLab(nn.Module):
    """Atrous pyramid with image pooling; an auxiliary head; a dict of results."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv_bn(3, 4), conv_bn(4, 8, stride=2))
        self.pyramid = nn.ModuleList([conv_bn(8, 4, 1), conv_bn(8, 4, dilation=2), conv_bn(8, 4, dilation=3)])
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.ReLU())
        self.project = nn.Sequential(nn.Conv2d(16, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
        self.head, self.aux = nn.Conv2d(4, 3, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size = x.shape[-2:]
        f = self.backbone(x)
        pooled = F.interpolate(self.pool(f), size=f.shape[-2:], mode="bilinear", align_corners=False)
        y = self.project(torch.cat([*(p(f) for p in self.pyramid), pooled], 1))
        up = {"size": size, "mode": "bilinear", "align_corners": False}
        return {"out": F.interpolate(self.head(y), **up), "aux": F.interpolate(self.aux(f), **up)}


class AmoebaCell(nn.Module):
    """Reads its two predecessors; joins five pairwise sums."""

    def __init__(self, i: int, j: int, o: int) -> None:
        super().__init__()
        self.first, self.second = conv_bn(i, o, 1), conv_bn(j, o, 1)
        self.separable = nn.Sequential(nn.Conv2d(o, o, 3, 1, 1, groups=o, bias=False), nn.Conv2d(o, o, 1, bias=False), nn.BatchNorm2d(o))
        self.wide = nn.Conv2d(o, o, (1, 3), padding=(0, 1), bias=False)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        p, q = self.first(a), self.second(b)
        s = F.avg_pool2d(p, 3, 1, 1) + F.max_pool2d(q, 3, 1, 1)
        t = self.separable(q) + p
        u = self.wide(s) + t
        return b, torch.cat([s, u], 1)


class AmoebaNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 4)
        self.cells = nn.ModuleList([AmoebaCell(4, 4, 3), AmoebaCell(4, 6, 3), AmoebaCell(6, 6, 4)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = b = self.stem(x)
        for cell in self.cells:
            a, b = cell(a, b)
        return self.head(b.mean((2, 3)))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 4)
        self.one, self.three = conv_bn(4, 3, 1), nn.Sequential(conv_bn(4, 2, 1), conv_bn(2, 4))
        self.five = nn.Sequential(conv_bn(4, 2, 1), conv_bn(2, 2, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_bn(4, 2, 1))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(11, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.BatchNorm2d(4 + 3 * k), nn.ReLU(), nn.Conv2d(4 + 3 * k, 3, 3, padding=1)) for k in range(4)]
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(torch.cat(found, 1).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.heads, self.dropout = heads, dropout

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, rotary: Any = None, causal: bool = False
    ) -> Tensor:
        b, n, d = x.shape
        k, v = self.kv(x if memory is None else memory).chunk(2, -1)
        q, k, v = (t.view(b, -1, self.heads, d // self.heads).transpose(1, 2) for t in (self.q(x), k, v))
        if rotary is not None:
            q, k = rotary(q), rotary(k)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal)
        return self.o(y.transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, dim: int, dropout: float = 0.1, cross: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, dropout=dropout)
        self.cross = Attention(dim, dropout=dropout) if cross else None
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor, memory: Tensor | None = None, **options: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), **options)
        if self.cross is not None and memory is not None:
            x = x + self.cross(self.norm1(x), memory)
        return x + self.mlp(self.norm2(x))


class Bert(nn.Module):
    """Mask as a keyword, three embeddings, a decoder tied to the words."""

    def __init__(self, dim: int = 8, words: int = 20) -> None:
        super().__init__()
        self.words, self.positions, self.kinds = nn.Embedding(words, dim), nn.Embedding(16, dim), nn.Embedding(2, dim)
        self.norm, self.layers = nn.LayerNorm(dim), nn.ModuleList([Layer(dim), Layer(dim)])
        self.pooler, self.decoder = nn.Linear(dim, dim), nn.Linear(dim, words)
        self.decoder.weight = self.words.weight
        self.register_buffer("ids", torch.arange(16), persistent=False)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        n = ids.shape[1]
        x = self.norm(self.words(ids) + self.positions(self.ids[:n]) + self.kinds(torch.zeros_like(ids)))
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.decoder(x), torch.tanh(self.pooler(x[:, 0]))


class Gpt2(nn.Module):
    """Causal, positions made while running, head tied to the embedding."""

    def __init__(self, dim: int = 8, words: int = 20) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(words, dim), nn.Embedding(16, dim), nn.Dropout(0.1)
        self.h, self.ln_f = nn.ModuleList([Layer(dim), Layer(dim)]), nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, words, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.h:
            x = layer(x, causal=True)
        return self.lm_head(self.ln_f(x))


class T5(nn.Module):
    """Encoder and decoder that share the embedding; the encoder's result is read by every decoder layer."""

    def __init__(self, dim: int = 8, words: int = 20) -> None:
        super().__init__()
        self.shared = nn.Embedding(words, dim)
        self.encoder, self.decoder = (nn.ModuleList([Layer(dim)]), nn.ModuleList([Layer(dim, cross=True), Layer(dim, cross=True)]))
        self.head = nn.Linear(dim, words)

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> dict[str, Tensor]:
        memory, x = self.shared(ids), self.shared(decoder_ids)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory, causal=True)
        return {"logits": self.head(x) * 8**-0.5, "memory": memory}


class Rotary(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inverse", 1.0 / 100 ** (torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[-2], device=x.device).to(self.inverse.dtype), self.inverse)
        cos, sin = (f(torch.cat([angles, angles], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin


class RmsNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LlamaLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = RmsNorm(dim), RmsNorm(dim), Attention(dim, dropout=0.0)
        self.gate, self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attention(self.norm1(x), rotary=rotary, causal=True)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, dim: int = 8, words: int = 20) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(words, dim), Rotary(dim // 2)
        self.layers, self.norm = nn.ModuleList([LlamaLayer(dim), LlamaLayer(dim)]), RmsNorm(dim)
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.head(self.norm(x))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.lower, self.upper = nn.LSTM(6, 5, batch_first=True), nn.LSTM(5, 5, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(5, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x, state = self.lower(self.embed(ids))
        y, _ = self.upper(x)
        return self.head(y + state[0].transpose(0, 1))


class Gnn(nn.Module):
    """Messages along edges, summed at nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.message1, self.message2, self.head = (nn.Linear(3, 6), nn.Linear(12, 6), nn.Linear(12, 6), nn.Linear(6, 2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.enter(x))
        source, target = edges[0], edges[1]
        for message in (self.message1, self.message2):
            m = torch.relu(message(torch.cat([h[source], h[target]], -1)))
            h = h + torch.zeros_like(h).index_add_(0, target, m)
        return self.head(h)


class Siamese(nn.Module):
    """One tower, called twice: all its weights are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.join = nn.Linear(8, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.tower(left), self.tower(right)
        return self.join(torch.cat([(a - b).abs(), a * b], -1))


class TwoInputs(nn.Module):
    """A picture and a table, of which one is optional; joined late."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.table = nn.Sequential(conv_bn(3, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(5, 4)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 3))

    def forward(self, picture: Tensor, *, table: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(torch.cat([self.picture(picture), self.table(table) * scale], 1))


class Outputs(nn.Module):
    """A nest of results, one of which does not depend on parameters, and one that a later layer reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread, self.value = (nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(3, 1))

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.body(x))
        mean = self.mean(h)
        return {"policy": (mean, F.softplus(self.spread(h))), "value": self.value(mean), "norm": x.norm(dim=1), "none": None}


class Gated(nn.Module):
    """Branches on its data, in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean().item() > 0:
            return torch.relu(self.low(x))
        return torch.tanh(self.high(x)) * 2


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate, self.leave = nn.Linear(6, 8), Gated(), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.gate(self.enter(x)))


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients through; its true gradient is 0, so a tracer that forgets the backward is found out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: float) -> Tensor:
        return torch.round(x * levels) / levels

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * 1.5, None


straight = Straight.apply


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = straight(torch.tanh(self.first(x)), 8.0)
        return self.third(Straight.apply(torch.tanh(self.second(h)), 4.0))


def frozen() -> nn.Module:
    """A body that is not trained, under a head that is; one unused parameter."""
    model = ResNet()
    for p in model.stem.parameters():
        p.requires_grad_(False)
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    model.unread = nn.Parameter(torch.ones(3))
    return model


class OddBatch(nn.Module):
    """Uses the batch's size in its arithmetic, so a size that was baked in would be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        h = torch.relu(self.first(x.reshape(n, -1)))
        h = h - h.sum(0, keepdim=True) / n
        return self.second(h) + torch.arange(n, device=x.device)[:, None] / (10 * n)


def _edges() -> Tensor:
    return torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 4]])


MODELS: dict[str, Callable[[], Example]] = {
    "resnet": lambda: Example(model=ResNet(), args=image()),
    "wide-resnet": lambda: Example(model=ResNet(width=8, dropout=0.3), args=image()),
    "u-net": lambda: Example(model=UNet(), args=image(size=12)),
    "deeplab-v3": lambda: Example(model=DeepLab(), args=image()),
    "amoebanet": lambda: Example(model=AmoebaNet(), args=image()),
    "inception": lambda: Example(model=Inception(), args=image()),
    "densenet": lambda: Example(model=DenseNet(), args=image()),
    "bert": lambda: Example(model=Bert(), args=(tokens(),), kwargs={"attention_mask": torch.ones(BATCH, 6).tril(4)}),
    "gpt-2": lambda: Example(model=Gpt2(), args=(tokens(),)),
    "t5": lambda: Example(model=T5(), args=(tokens(), tokens(5))),
    "llama": lambda: Example(model=Llama(), args=(tokens(),)),
    "lstm": lambda: Example(model=Lstm(), args=(tokens(),)),
    "gnn": lambda: Example(model=Gnn(), args=(torch.randn(5, 3), _edges())),
    "siamese": lambda: Example(model=Siamese(), args=(torch.randn(BATCH, 6), torch.randn(BATCH, 6))),
    "two-inputs": lambda: Example(model=TwoInputs(), args=image(), kwargs={"table": torch.randn(BATCH, 5), "scale": 0.5}),
    "multiple-outputs": lambda: Example(model=Outputs(), args=(torch.randn(BATCH, 6),)),
    "data-dependent-branch": lambda: Example(model=Branching(), args=(torch.randn(BATCH, 6),)),
    "custom-autograd-function": lambda: Example(model=Quantised(), args=(torch.randn(BATCH, 6),)),
    "frozen-parameters": lambda: Example(model=frozen(), args=image()),
    "odd-last-batch": lambda: Example(model=OddBatch(), args=(torch.randn(BATCH, 3, 4),)),
}
