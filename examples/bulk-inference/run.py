"""An ONNX model over a folder of images, on functions.

python run.py                                       # 3,188 images on this machine
python run.py --images 300 --platform simulated     # in virtual time

The first call makes the images and the model from the digits of scikit-learn: a network learns 1,000 of them, and each of the others is drawn several times,
turned, moved and blotched.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ephemeron.maps import map_items

HERE = Path(__file__).parent
LEARNED, DRAWN = 1000, 4
"""Digits that the network learns, and images of each other one."""
HIDDEN, COPIES = 64, 8
"""Size of the network, and images of each digit that it learns."""
SHOWN = 20
"""Images in the picture."""


def drawn(gray: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A digit of 8 x 8 pixels as an image of 28 x 28, turned, moved and blotched, 0 to 255."""
    from PIL import Image

    image = Image.fromarray((gray * 255 / 16).astype(np.uint8)).resize((20, 20), Image.Resampling.BICUBIC)
    whole = Image.new("L", (28, 28))
    whole.paste(image, (4 + int(rng.integers(-3, 4)), 4 + int(rng.integers(-3, 4))))
    turned = np.asarray(whole.rotate(float(rng.normal(0, 14)), Image.Resampling.BILINEAR), float)
    return np.clip(turned + rng.normal(0, 18, turned.shape), 0, 255).astype(np.uint8)


def images() -> Iterator[tuple[str, np.ndarray]]:
    """Names and pixels of the images that the network has not seen."""
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), np.random.default_rng(1)
    for n in range(LEARNED, len(digits.images)):
        for k in range(DRAWN):
            yield f"{digits.target[n]}/{n:04d}-{k}.png", drawn(digits.images[n], rng)


def write_images(folder: Path, most: int) -> None:
    """Writes the images that are not there: one that is written again would be computed again."""
    from PIL import Image

    for name, gray in itertools.islice(images(), most):
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.part")
            Image.fromarray(gray).save(part, "png")
            part.replace(path)


def write_model(path: Path) -> None:
    """Trains a network of one hidden layer, and writes it as ONNX."""
    import warnings

    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from sklearn.datasets import load_digits
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    digits, rng = load_digits(), np.random.default_rng(0)
    every = [n for n in range(LEARNED) for _ in range(COPIES)]
    x = np.stack([drawn(digits.images[n], rng).reshape(-1) for n in every]).astype(np.float32) / 255
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 20 passes are enough here
        network = MLPClassifier((HIDDEN,), random_state=0, max_iter=20, learning_rate_init=0.002).fit(x, digits.target[every])
    weights = {
        name: numpy_helper.from_array(np.asarray(array, np.float32), name)
        for name, array in zip(("w1", "w2", "b1", "b2"), (*network.coefs_, *network.intercepts_), strict=True)
    }
    nodes = [
        helper.make_node("Gemm", ["pixels", "w1", "b1"], ["before"]),
        helper.make_node("Relu", ["before"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "w2", "b2"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["images", x.shape[1]])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["images", 10])],
        list(weights.values()),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def draw(rows: list[dict], folder: Path, path: Path) -> None:
    """Which digits are taken for which, and the images that the model is least sure of."""
    from matplotlib.figure import Figure
    from PIL import Image

    truth = np.array([int(row["image"].partition("/")[0]) for row in rows])
    found = np.array([row["digit"] for row in rows])
    confusion = np.zeros((10, 10), int)
    np.add.at(confusion, (truth, found), 1)
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    axes.imshow(np.log1p(confusion), cmap="Blues")
    for a, b in np.ndindex(10, 10):
        if confusion[a, b]:
            axes.text(b, a, confusion[a, b], ha="center", va="center", fontsize=7, color="white" if a == b else "black")
    axes.set(xticks=range(10), yticks=range(10), xlabel="digit by the model", ylabel="digit of the image")
    left.suptitle(f"{len(rows):,} images, {np.mean(truth == found):.1%} right")
    right.suptitle("least sure of")
    for one, place in zip(sorted(rows, key=lambda row: row["margin"])[:SHOWN], right.subplots(4, SHOWN // 4).flat, strict=False):
        is_right = int(one["image"].partition("/")[0]) == one["digit"]
        place.imshow(Image.open(folder / one["image"]), cmap="gray")
        place.set_title(f"{one['digit']}, or {one['second']}", fontsize=8, color="black" if is_right else "crimson")
    for place in right.axes:
        place.axis("off")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    """Makes images and a model where they are not there, classifies the images, and draws what has come of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=10_000, help="at most")
    parser.add_argument("--platform", default="local")
    given = parser.parse_args(arguments)
    out = HERE / "out"
    if not (HERE / "digits.onnx").exists():
        write_model(HERE / "digits.onnx")
    write_images(out / "images", given.images)
    result = map_items(
        "classify:digit",
        out / "images",
        out=out / "predictions.parquet",
        code_include=["digits.onnx"],
        platform=given.platform,
        on_note=print,
        on_failure=lambda failure: print(f"{failure.key}: {failure.error}"),
    )
    print(
        f"{result.computed:,} images were classified in {result.seconds:.1f} s, {result.recorded:,} before; {result.bill or 'no function was needed'}"
    )
    if result.stopped:
        raise SystemExit(f"{result.stopped}: run it again, and it goes on")
    rows = [json.loads(row["result"]) for row in result.rows() if row["status"] == "ok"]
    draw(rows, out / "images", out / "digits.png")
    print(f"predictions: {out / 'predictions.parquet'}; picture: {out / 'digits.png'}")


if __name__ == "__main__":
    main()
