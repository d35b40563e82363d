"""An RNN transducer on LibriSpeech's layout: on a flow as on a DataLoader; its loss against enumeration."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import speech
import torch
from hypothesis import given
from hypothesis import strategies as st
from task_curves import EXAMPLES, falls, on_dataloader, on_flow, seeded_view, weights_as_job

soundfile = pytest.importorskip("soundfile", reason="no soundfile; pip install 'ephemeron[audio]'")

BATCH = 8


class Plain(torch.utils.data.Dataset[Any]):
    """Features and letters without random steps, read without ephemeron."""

    def __init__(self, folder: Path) -> None:
        self.chapter = folder / "speech" / "19" / "198"
        self.lines = (self.chapter / "19-198.trans.txt").read_text().splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        name, text = self.lines[i].split(" ", 1)
        samples, rate = soundfile.read(self.chapter / f"{name}.flac", dtype="float32")
        assert rate == speech.RATE_HZ
        frames = np.stack([samples[at : at + 200] for at in range(0, len(samples) - 199, 80)]) * np.hanning(200)
        power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
        features = np.log(power @ speech.mel_bands() + 1e-6).astype(np.float32)
        return features, np.array([speech.LETTERS.index(letter) + 1 for letter in text])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("speech")
    speech.make(made, samples=60)
    return made


def test_recordings_and_texts_differ_in_length(folder):
    samples = speech.plain(folder / "store").prepare_read().to_mapped()
    assert len({len(features) for features, _ in (samples[i] for i in range(20))}) > 5
    (features, frames, texts), (same, lengths) = speech.collate([samples[i] for i in range(8)])
    assert features.shape == (8, int(frames.max()), speech.MELS)
    assert texts.shape == (8, int(lengths.max()))
    assert torch.equal(texts, same)


def test_mel_bands_cover_every_frequency_once():
    """Neighbouring triangles add up to one between the first and the last peak."""
    bands = speech.mel_bands()
    peaks = bands.argmax(axis=0)
    inner = bands.sum(axis=1)[peaks[0] + 1 : peaks[-1]]
    assert inner == pytest.approx(np.ones(len(inner)))
    assert (np.diff(peaks) >= 0).all()


def test_the_loss_curve_is_that_of_a_dataloader(folder):
    mine = on_flow(speech, speech.plain(folder / "store"), batch_size=BATCH)
    assert mine == on_dataloader(speech, Plain(folder), batch_size=BATCH)
    assert len(mine) == 3 * 8
    assert falls(mine, 0.8)


def test_masks_are_drawn_alike_everywhere(folder):
    flow = speech.train(folder / "store")
    mine = on_flow(speech, flow, batch_size=BATCH, epochs=2)
    assert mine == on_dataloader(speech, seeded_view(flow), batch_size=BATCH, epochs=2)
    assert mine != on_flow(speech, speech.plain(folder / "store"), batch_size=BATCH, epochs=2, loaders=0)


@pytest.mark.slow
def test_as_a_job_whose_function_dies(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    whole = weights_as_job("speech", folder / "store", hidden=12)
    assert weights_as_job("speech", folder / "store", "kill:rank=0,iteration=2,phase=aggregate", hidden=12) == whole


def enumerated(scores: torch.Tensor, text: list[int], frames: int) -> torch.Tensor:
    """-ln of the sum over all ways through the lattice: in which of the frames each letter is emitted."""
    ways = []
    for places in itertools.combinations_with_replacement(range(frames), len(text)):
        score, u = torch.zeros((), dtype=scores.dtype), 0
        for t in range(frames):
            while u < len(text) and places[u] == t:
                score, u = score + scores[t, u, text[u]], u + 1
            score = score + scores[t, u, 0]
        ways.append(score)
    return -torch.stack(ways).logsumexp(dim=0)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3),
    seed=st.integers(0, 999),
    spread=st.floats(0.1, 5),
)
def test_the_forward_algorithm_sums_over_all_ways(sizes, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    frames, lengths = (torch.tensor(n) for n in zip(*sizes, strict=True))
    most = max(1, int(lengths.max()))
    logits = spread * torch.randn(len(sizes), int(frames.max()), most + 1, 4, generator=generator, dtype=torch.float64)
    texts = torch.randint(1, 4, (len(sizes), most), generator=generator)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    mine = speech.transducer_loss(a.log_softmax(dim=3), texts, frames, lengths)
    scores = b.log_softmax(dim=3)
    theirs = torch.stack([enumerated(scores[i], texts[i, :u].tolist(), t) for i, (t, u) in enumerate(sizes)])
    assert torch.allclose(mine, theirs, atol=1e-9)
    mine.sum().backward()
    theirs.sum().backward()
    assert torch.allclose(a.grad, b.grad, atol=1e-9)


def test_the_probabilities_of_all_texts_add_up():
    """Of one frame and two letters: a text of more than eight has a chance of 0.2**9."""
    scores = torch.full((1, 1, 9, 3), 0.0, dtype=torch.float64)
    scores[..., 0] = 2.0
    scores = scores.log_softmax(dim=3)
    total = sum(
        float((-speech.transducer_loss(scores, torch.tensor([text or (1,)]), torch.tensor([1]), torch.tensor([len(text)]))).exp())
        for n in range(9)
        for text in itertools.product((1, 2), repeat=n)
    )
    assert total == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classification", "detection", "speech"])
def test_the_examples_say_what_they_are(name):
    ran = subprocess.run([sys.executable, EXAMPLES / f"{name}.py", "--help"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "--loaders" in ran.stdout


@pytest.mark.slow
def test_an_example_runs(tmp_path):
    command = [sys.executable, EXAMPLES / "speech.py", "--folder", tmp_path, "--samples", "16", "--epochs", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "epoch 2/2  loss" in ran.stdout
    assert "trainer waited" in ran.stdout
