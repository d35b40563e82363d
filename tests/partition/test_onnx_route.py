"""The thesis's route: models to ONNX and the graph of the file; and what is lost on it."""

from __future__ import annotations

import builtins

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from models import MODELS, Branching, Siamese, UNet  # noqa: E402
from onnx_route import export_onnx, onnx_graph  # noqa: E402

from ephemeron.errors import JobError, MissingExtra  # noqa: E402


def test_an_absent_exporter_is_named(monkeypatch, tmp_path):
    plain = builtins.__import__

    def without(name, *rest, **more):
        if name == "onnx":
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install 'ephemeron\[onnx\]'"):
        onnx_graph(tmp_path / "x.onnx")


class TestWithOnnx:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("onnx", reason="no ONNX; pip install 'ephemeron[onnx]'")
        pytest.importorskip("onnxscript", reason="no ONNX exporter; pip install 'ephemeron[onnx]'")

    @pytest.mark.slow
    def test_a_model_becomes_a_file_and_the_file_a_graph(self, tmp_path):
        torch.manual_seed(0)
        e = MODELS["u-net"]()
        path = tmp_path / "model.onnx"
        export_onnx(e.model, e.args, path)
        graph = onnx_graph(path)
        assert isinstance(e.model, UNet)
        assert sum(n.name.startswith("node_conv2d") for n in graph.nodes) == 6
        parameters = sum(4 * p.numel() for p in e.model.parameters())
        assert sum(n.parameter_bytes for n in graph.nodes) >= parameters
        (given,) = [t for t in graph.tensors if t.producer == t.name]
        assert given.nbytes == 4 * e.args[0].numel()
        assert any(not t.consumers for t in graph.tensors), "the result"

    def test_batch_statistics_are_lost(self, tmp_path):
        """Why stages are not made from ONNX: nothing in the file changes a buffer."""
        import onnx

        model = Siamese()
        export_onnx(model, (torch.randn(4, 6), torch.randn(4, 6)), tmp_path / "m.onnx")
        file = onnx.load(str(tmp_path / "m.onnx")).graph
        assert len(file.output) == 1
        assert "tower.1.running_mean" in {i.name for i in file.initializer}

    def test_what_onnx_cannot_say_is_refused(self, tmp_path):
        with pytest.raises(JobError, match=r"Branching cannot be written as ONNX: .*; use trace"):
            export_onnx(Branching(), (torch.randn(4, 6),), tmp_path / "m.onnx")

    def test_what_is_no_onnx_file_is_refused(self, tmp_path):
        (tmp_path / "m.onnx").write_bytes(b"\xff not onnx")
        with pytest.raises(JobError, match="cannot be read as ONNX"):
            onnx_graph(tmp_path / "m.onnx")
