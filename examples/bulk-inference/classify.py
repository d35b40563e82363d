"""Which digit an image shows, by an ONNX model. Functions import this module, ONNX Runtime, Pillow and NumPy alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

try:
    import onnxruntime
except ModuleNotFoundError:
    raise ModuleNotFoundError("ONNX Runtime is not installed; run: pip install 'ephemeron[inference]'") from None

MODEL = Path(__file__).with_name("digits.onnx")


@cache
def session() -> onnxruntime.InferenceSession:
    """The model, which a process of a function loads with its first image, and keeps."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # a function has a share of a core; more threads would wait for each other
    return onnxruntime.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])


def pixels(path: str) -> np.ndarray:
    """An image as the model takes it, [1, 784]: 28 x 28 pixels, 0 to 1."""
    with Image.open(path) as image:
        return np.asarray(image.convert("L").resize((28, 28)), np.float32).reshape(1, -1) / 255


def digit(path: str) -> dict[str, object]:
    """The most probable digit of an image, and how probable it and the second one are."""
    [probabilities] = session().run(None, {"pixels": pixels(path)})[0]
    second, first = np.argsort(probabilities)[-2:]
    return {
        "image": "/".join(Path(path).parts[-2:]),
        "digit": int(first),
        "probability": round(float(probabilities[first]), 6),
        "second": int(second),
        "margin": round(float(probabilities[first] - probabilities[second]), 6),
    }
