"""What a run saves loads into plain PyTorch, strictly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import CODE, make_job, real

from ephemeron.training.driver.result import write_weights
from ephemeron.training.job import DataSpec, Target


def built(name: str) -> torch.nn.Module:
    spec = importlib.util.spec_from_file_location("plain_tiny", CODE / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_tiny"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)()


WORDS = {"data": DataSpec(source="tiny:sequences"), "loss": Target(target="tiny:words_loss")}
MODELS = {"gpt_like": WORDS, "gpt_like_bf16": WORDS, "with_batch_norm": {}, "tied": {}}


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("with_batch_norm", 1),
        ("tied", 2),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in MODELS if name != "with_batch_norm"),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in MODELS if name != "tied"),
    ],
)
def test_saved_weights_load_strictly(name: str, stages: int, tmp_path: Path) -> None:
    job = make_job(model=Target(target=f"tiny:{name}"), **MODELS[name])
    ending = real(job, workers=2, aggregators=1, stages={"count": stages}, batch_size=8 if MODELS[name] else 240).ending
    assert ending.status == "finished", ending.causes
    path = tmp_path / "weights.safetensors"
    write_weights(path, ending.arrays, ending.final.bf16)
    saved = load_file(path)
    plain = built(name)
    before = {k: t.clone() for k, t in plain.state_dict().items()}
    assert sorted(saved) == sorted(before)
    plain.load_state_dict(saved, strict=True)
    for key, t in plain.state_dict().items():
        assert (saved[key].dtype, saved[key].shape) == (before[key].dtype, before[key].shape)
        torch.testing.assert_close(t, saved[key], rtol=0, atol=0)
    assert any(not torch.equal(t, before[k]) for k, t in plain.state_dict().items()), "nothing was trained"
    if name == "with_batch_norm":
        assert int(saved["2.num_batches_tracked"]) == ending.final.iterations
        assert not torch.equal(saved["2.running_mean"], before["2.running_mean"])
