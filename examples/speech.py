"""Speech recognition: an RNN transducer (Graves 2012; Rao et al. 2017) on recordings in LibriSpeech's layout.

    python examples/speech.py --samples 200 --epochs 5 --loaders 2

Log-mel features are a step of the flow. Recordings and texts differ in length, so `collate` pads them and passes their lengths
on. The recordings are generated: a tone for every letter. For your own recordings:
ephemeron data import librispeech FOLDER me/speech
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ephemeron.data.catalog import DatasetStore
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.flow import Flow

NAME = "example/speech"
LETTERS = " ABCDEFGH"
"""Symbols of the texts. Number 0 is the blank, the i-th letter i + 1."""
RATE_HZ = 8000
WINDOW, HOP = 200, 80
"""Window and hop of the features: 25 ms and 10 ms, in samples."""
MELS = 24
STACK = 4
"""Number of feature frames that the encoder joins into one."""


def make(folder: Path, *, samples: int, seed: int = 0) -> None:
    """Writes FLAC files and transcripts to `folder/speech` and describes them in `folder/store`."""
    import soundfile

    rng = np.random.default_rng(seed)
    chapter = folder / "speech" / "19" / "198"
    chapter.mkdir(parents=True)
    lines = []
    for i in range(samples):
        text = "".join(rng.choice(list(LETTERS[1:]), rng.integers(1, 5)))
        name = f"19-198-{i:04}"
        soundfile.write(chapter / f"{name}.flac", spoken(text, rng), RATE_HZ)
        lines.append(f"{name} {text}\n")
    (chapter / "19-198.trans.txt").write_text("".join(lines))
    import_dataset("librispeech", str(folder / "speech"), NAME, DatasetStore.open(str(folder / "store")))


def spoken(text: str, rng: np.random.Generator) -> Any:
    """Recording of a text, a tone of about 80 ms for each letter, in noise: float64 samples in [-1, 1]."""
    tones = []
    for letter in text:
        t = np.arange(int(RATE_HZ * rng.uniform(0.06, 0.1))) / RATE_HZ
        tones += [0.5 * np.sin(2 * np.pi * 300 * 1.35 ** LETTERS.index(letter) * t), np.zeros(int(0.02 * RATE_HZ))]
    clean = np.concatenate(tones)
    return (clean + rng.normal(0, 0.01, len(clean))).clip(-1, 1)


def train(path: Path) -> Flow:
    """Flow for training, with SpecAugment's frequency masks (Park et al. 2019, section 2)."""
    return plain(path).map_data("mask", mask)


def plain(path: Path) -> Flow:
    """Flow for tests."""
    flow = Flow("example/speech").dataset(NAME, variant="train", store=str(path))
    return flow.map_data("log_mel", log_mel, cache_control="can-cache").map_target("letters", letters)


def log_mel(audio: Any) -> Any:
    """Log energies in mel bands: float32 (frames, MELS)."""
    frames = np.lib.stride_tricks.sliding_window_view(audio.samples, WINDOW)[::HOP] * np.hanning(WINDOW)
    power = abs(np.fft.rfft(frames, axis=1)) ** 2
    return np.log(power @ mel_bands() + 1e-6).astype(np.float32)


@cache
def mel_bands() -> Any:
    """Triangular filters, equally wide in mels: (WINDOW // 2 + 1, MELS)."""
    most = 2595 * np.log10(1 + RATE_HZ / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, most, MELS + 2) / 2595) - 1)
    hertz = np.fft.rfftfreq(WINDOW, 1 / RATE_HZ)[:, None]
    rising = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    return np.minimum(rising, falling).clip(0)


def mask(features: Any) -> Any:
    """Masks a few neighbouring bands."""
    width = np.random.randint(0, 4)
    first = np.random.randint(0, MELS - width + 1)
    out = features.copy()
    out[:, first : first + width] = features.mean()
    return out


def letters(text: str) -> Any:
    """Numbers of a text's letters, from 1."""
    return np.array([LETTERS.index(letter) + 1 for letter in text], dtype=np.int64)


def collate(samples: list[Any]) -> tuple[Any, Any]:
    """Inputs `(features, frames, texts)`, targets `(texts, lengths)`; features and texts are padded with 0.

    The transducer predicts each letter from those before it, so the model gets the texts, too.
    """
    frames = torch.tensor([len(features) for features, _ in samples])
    lengths = torch.tensor([len(text) for _, text in samples])
    features = nn.utils.rnn.pad_sequence([torch.from_numpy(f) for f, _ in samples], batch_first=True)
    texts = nn.utils.rnn.pad_sequence([torch.from_numpy(t) for _, t in samples], batch_first=True)
    return (features, frames, texts), (texts, lengths)


class Transducer(nn.Module):
    """Network of an encoder of sounds, a predictor of letters, and a joiner of both (Graves 2012, section 2)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.encoder = nn.GRU(STACK * MELS, hidden, batch_first=True)
        self.embedding = nn.Embedding(len(LETTERS) + 1, hidden)
        self.predictor = nn.GRU(hidden, hidden, batch_first=True)
        self.joiner = nn.Sequential(nn.Tanh(), nn.Linear(hidden, len(LETTERS) + 1))

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probabilities (N, T, U + 1, letters + 1), and the number of valid frames of each utterance."""
        features, frames, texts = inputs
        steps = -(-features.shape[1] // STACK)
        padded = nn.functional.pad(features, (0, 0, 0, steps * STACK - features.shape[1]))
        sounds, _ = self.encoder(padded.reshape(len(features), steps, STACK * MELS) / 10)
        before = nn.functional.pad(texts, (1, 0))  # the blank represents the beginning
        words, _ = self.predictor(self.embedding(before))
        joint = self.joiner(sounds[:, :, None] + words[:, None])
        return joint.log_softmax(dim=3), (frames + STACK - 1) // STACK


def build(hidden: int = 48) -> nn.Module:
    return Transducer(hidden)


def loss(output: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean over utterances of -ln Pr(text | sounds)."""
    (scores, frames), (texts, lengths) = output, targets
    return transducer_loss(scores, texts, frames, lengths).mean()


def transducer_loss(scores: torch.Tensor, texts: torch.Tensor, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """-ln Pr(text | sounds) by the forward algorithm (Graves 2012, equations 16 to 18).

        α(t, u) = α(t-1, u) ∅(t-1, u) + α(t, u-1) y(t, u-1)

    Along u this sum is computed for all u at once by a cumulative sum: with c(t, u) = Σ_{k<u} ln y(t, k),
    ln α(t, u) = c(t, u) + ln Σ_{k≤u} exp(ln α(t-1, k) + ln ∅(t-1, k) - c(t, k)). So there are T steps instead of T·U.

    Args:
        scores: log probabilities, (N, T, U + 1, symbols); symbol 0 is the blank ∅.
        texts: (N, U), padded with any symbol.
        frames: of each utterance, 1 to T.
        lengths: of each text, 0 to U.

    Returns:
        (N,).
    """
    blank = scores[..., 0]
    emit = scores[:, :, :-1].gather(3, texts[:, None, :, None].expand(-1, scores.shape[1], -1, 1))[..., 0]
    along = nn.functional.pad(emit.cumsum(dim=2), (1, 0))
    alpha = [along[:, 0]]
    for t in range(1, scores.shape[1]):
        alpha.append(along[:, t] + (alpha[-1] + blank[:, t - 1] - along[:, t]).logcumsumexp(dim=1))
    rows = torch.arange(len(scores))
    return -(torch.stack(alpha, dim=1)[rows, frames - 1, lengths] + blank[rows, frames - 1, lengths])


if __name__ == "__main__":
    from fitting import main

    main("speech")
