"""`ephemeron init` and `ephemeron completion`: something to start from, and commands that the shell completes."""

from __future__ import annotations

from pathlib import Path

import click

from ephemeron.errors import JobError

_MODEL = '''\
"""The model that job.toml names."""

import torch


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
'''
_JOB = """\
# A training job. Keys: `ephemeron schema`; options of [run]: `ephemeron train --help`.
name = "{name}"
model = "model:build"
loss = "cross_entropy"
optimizer = {{ target = "SGD", options = {{ lr = 0.1, momentum = 0.9 }} }}
epochs = 5

[data]
source = "digits"      # scikit-learn's handwritten digits; your own: docs/data.md

[limits]
budget_usd = 0.05      # a run that reaches it stops with a checkpoint

[run]                  # without workers, memory and batch sizes, the job is measured and planned first
workers = 2
batch_size = 32
"""
_TASK = '''\
"""A training program: the model, its data, and what a step computes. Everything else can be overridden as well (docs/programs.md)."""

import torch
from torch.utils.data import TensorDataset

from ephemeron import Task


class Classifier(Task):
    settings = {"loss": "cross_entropy", "optimizer": {"target": "SGD", "options": {"lr": 0.1}}, "epochs": 5}

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def train_data(self) -> TensorDataset:
        x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x.sum(1) > 0).long())
'''
_MAP = '''\
"""A function that is called with each item of a file, on functions."""


def count(text: str) -> dict[str, int]:
    words = text.split()
    return {"words": len(words), "letters": sum(map(len, words))}
'''
_ITEMS = '"the cat and the dog"\n"one line is one item, as JSON"\n'

_STARTERS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "job": (
        "a training job as a file, and its model",
        {"job.toml": _JOB, "model.py": _MODEL},
        ("ephemeron train job.toml", "ephemeron plan job.toml"),
    ),
    "task": ("a training program as a class", {"task.py": _TASK}, ("ephemeron train task:Classifier --workers 2 --batch-size 32",)),
    "map": (
        "a function over the items of a file",
        {"words.py": _MAP, "items.jsonl": _ITEMS},
        ("ephemeron map words:count --items items.jsonl --out counts.jsonl",),
    ),
}
"""Kind to what it is, files by name, and commands that run it."""


@click.command("init", short_help="Write a job, a task or a map to start from.")
@click.argument("kind", type=click.Choice(tuple(_STARTERS)))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    metavar="FOLDER",
    help="Folder for the files.  [default: this one]",
)
def init(kind: str, out: Path) -> None:
    """Write files to start from, which run as they are. Files that are there stay.

    \b
    ephemeron init job        job.toml and model.py
    ephemeron init task       task.py, a class
    ephemeron init map        words.py and items.jsonl
    """
    what, files, commands = _STARTERS[kind]
    there = [name for name in files if (out / name).exists()]
    if there:
        raise JobError(f"{out / there[0]} is there already", remedy="name another folder with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text.format(name=out.resolve().name) if name == "job.toml" else text)
    except OSError as e:
        raise JobError(f"cannot write to {out}: {e.strerror}", remedy="name another folder with --out") from None
    click.echo(f"{what}: {', '.join(str(out / name) for name in files)}")
    place = "" if out.resolve() == Path.cwd() else f"cd {out} && "
    for command in commands:
        click.echo(f"  {place}{command}")


@click.command("completion", short_help="Print what makes a shell complete commands and options.")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes commands, options and their values.

    \b
    eval "$(ephemeron completion bash)"                                          now; in ~/.bashrc, always
    eval "$(ephemeron completion zsh)"                                           the same for ~/.zshrc
    ephemeron completion fish > ~/.config/fish/completions/ephemeron.fish
    """
    from click.shell_completion import get_completion_class

    root = click.get_current_context().find_root().command
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(root, {}, "ephemeron", "_EPHEMERON_COMPLETE").source())
