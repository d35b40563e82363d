"""Functions in an environment of their own, built from what `cloud deploy aws` writes: packages that were not deployed are not there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import ROLE, keys

from ephemeron.cli.main import main
from ephemeron.functions.source_bundle import name_of
from ephemeron.testing.lambda_service import LambdaService
from sparse_data import prepared

pytestmark = pytest.mark.slow

TOKEN = "a token of these tests"
EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning"


def built(folder: Path, requirements: Path) -> Path:
    """A Python with what a file of requirements installs, by links to this one's packages, and with nothing else.

    Args:
        folder: for it.
        requirements: as `cloud deploy aws` has written it.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    waiting = ["awslambdaric", *(name_of(line) for line in requirements.read_text().splitlines() if not line.startswith("-"))]
    seen = set[str]()
    while waiting:
        name = waiting.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # for another Python or platform
        waiting += [name_of(line) for line in found.requires or [] if "extra ==" not in line]
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    return folder / "bin" / "python"


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: Any) -> Iterator[Callable[..., list[str]]]:
    """Deploys with options of packages, and returns the options of a command that runs functions there."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    launcher = tmp_path / "start.sh"
    objects = {"AWS_ENDPOINT_URL_S3": s3_server.env["AWS_ENDPOINT_URL"]}
    with (
        keys(),
        LambdaService(
            concurrency=10, launcher=lambda: [str(launcher)], environment={**objects, "EPHEMERON_SPARSE_TOKEN": TOKEN}
        ) as service,
    ):
        monkeypatch.setenv(*next(iter(objects.items())))

        def deploy(*packages: str, memory_mb: int = 1024) -> list[str]:
            out = tmp_path / "aws"
            where = ["--endpoint", service.url, "--region", "us-east-1", "--role", ROLE, "--zip", "--no-dependencies"]
            done = invoke(
                "cloud",
                "deploy",
                "aws",
                "--channel",
                "s3://bucket/runs",
                "--out",
                str(out),
                "--memory-mb",
                str(memory_mb),
                *where,
                *packages,
            )
            assert done.exit_code == 0, done.output
            python = built(tmp_path / "environment", out / "image" / "requirements.txt")
            launcher.write_text(f'#!/bin/sh\nshift\nexec {python} "$@"\n')
            launcher.chmod(0o755)
            channel = (tmp_path / "objects").as_uri()
            return ["--platform", "aws", "--channel", channel, "--aws-endpoint", service.url, "--aws-region", "us-east-1"]

        yield deploy


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_what_is_not_deployed_is_not_there(functions: Callable[..., list[str]]) -> None:
    Path("late.py").write_text("def dig(n):\n    import scipy\n    return scipy.__version__\n")
    Path("items.jsonl").write_text("1\n")
    where = functions()
    done = invoke("map", "late:dig", "--items", "items.jsonl", "--out", "out.jsonl", "--retries", "0", *where)
    assert done.exit_code == 1, done.output
    assert "ModuleNotFoundError: No module named 'scipy'; put scipy==" in done.output
    assert "into a file of requirements, and run: ephemeron cloud deploy aws … --requirements FILE" in done.output


def test_scikit_learn_through_a_file_of_requirements(functions: Callable[..., list[str]]) -> None:
    Path("fits.py").write_text(
        "from sklearn.linear_model import LinearRegression\n\n"
        "def slope(n):\n    return LinearRegression().fit([[0.0], [1.0], [2.0]], [0.0, n, 2.0 * n]).coef_[0]\n"
    )
    Path("items.jsonl").write_text("1\n2\n3\n")
    asked = ["map", "fits:slope", "--items", "items.jsonl", "--out", "out.jsonl"]
    refused = invoke(*asked, *functions())
    assert refused.exit_code == 2
    assert "fits imports sklearn, which functions on aws do not have; put scikit-learn into" in " ".join(refused.output.split())
    Path("more.txt").write_text("scikit-learn\n")
    refused = invoke(*asked, "--requirements", "more.txt", *functions())
    assert refused.exit_code == 2
    words = "more.txt names scikit-learn, which functions on aws do not have; run: ephemeron cloud deploy aws … --requirements more.txt"
    assert words in " ".join(refused.output.split())
    done = invoke(*asked, "--requirements", "more.txt", *functions("--requirements", "more.txt"))
    assert done.exit_code == 0, done.output
    assert [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()] == pytest.approx([1.0, 2.0, 3.0])


def test_matrices_with_their_extra(functions: Callable[..., list[str]]) -> None:
    a = np.random.default_rng(0).standard_normal((40, 40))
    a = a @ a.T + 40 * np.eye(40)
    np.save("A.npy", a)
    where = functions()
    asked = ["linalg", "cholesky", "A.npy", "--out", "L.npy", "--tile", "20", "--max-workers", "2", *where]
    refused = invoke(*asked)
    assert refused.exit_code == 2, refused.output
    assert "linalg needs scipy, which functions on aws do not have; run: ephemeron cloud deploy aws … --extra linalg" in " ".join(
        refused.output.split()
    )
    functions("--extra", "linalg")
    done = invoke(*asked)
    assert done.exit_code == 0, done.output
    lower = np.load("L.npy")
    np.testing.assert_allclose(lower @ lower.T, a, rtol=1e-10)


def test_a_sparse_job_with_its_extra(functions: Callable[..., list[str]], s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_SPARSE_TOKEN", TOKEN)

    def write_job(shards: str) -> None:
        Path("job.toml").write_text(
            f'epochs = 2\n[sparse]\nmodel = "logistic"\n{shards}\noptimizer = {{ target = "adagrad", options = {{ learning_rate = 0.1 }} }}\n'
            f'[data]\nsource = "prepared"\noptions = {{ train = "{place}/train", test = "{place}/test" }}\n'
            "[run]\nworkers = 1\nbatch_size = 20\n"
        )

    where = functions(memory_mb=1769)
    place = f"{s3_server.address}/sparse"
    prepared(f"{place}/train", rows=2000)
    prepared(f"{place}/test", rows=400, partitions=1, seed=1)
    write_job("shards = 1")
    refused = invoke("train", "job.toml", *where)
    assert refused.exit_code == 2, refused.output
    assert "a sparse job needs scipy" in " ".join(refused.output.split())
    where = functions("--extra", "sparse", memory_mb=1769)
    refused = invoke("train", "job.toml", *where)
    assert refused.exit_code == 2, refused.output
    assert "functions on aws do not reach shards of this machine" in " ".join(refused.output.split())
    serve = [sys.executable, "-c", "from ephemeron.cli.main import main; main()", "serve", "sparse", "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        write_job(f"store = {json.loads(store.stdout.readline())['addresses']}")
        done = invoke("train", "job.toml", "--json", *where)
        store.terminate()
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["status"], found["platform"]) == ("finished", "aws")
    assert found["metrics"]["accuracy"] > 0.6


def test_lightning_with_its_extra(functions: Callable[..., list[str]]) -> None:
    pytest.importorskip("lightning", reason="no Lightning; pip install 'ephemeron[lightning]'")
    Path("module.py").write_text(
        "import lightning\nimport torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\n"
        "class Net(lightning.LightningModule):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = torch.nn.Linear(4, 2)\n"
        "    def forward(self, x):\n        return self.layer(x)\n"
        "    def training_step(self, batch, index):\n        x, y = batch\n        return torch.nn.functional.cross_entropy(self(x), y)\n"
        "    def configure_optimizers(self):\n        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "    def train_dataloader(self):\n        torch.manual_seed(0)\n"
        "        return DataLoader(TensorDataset(torch.randn(64, 4), torch.arange(64) % 2), batch_size=16)\n"
    )
    asked: list[Any] = ["train", "lightning:module:Net", "--workers", "1", "--batch-size", "16", "--epochs", "1", "--memory-mb", "1769"]
    refused = invoke(*asked, *functions(memory_mb=1769))
    assert refused.exit_code == 2, refused.output
    assert "imports lightning, which functions on aws do not have" in " ".join(refused.output.split())
    done = invoke(*asked, *functions("--extra", "lightning", memory_mb=1769))
    assert done.exit_code == 0, done.output
