"""The package as it is built: which module names which, circles, folders, and what users see of it.

`python tests/structure.py` rewrites `tests/snapshots/`, which `test_structure` compares with.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "ephemeron"
SNAPSHOTS = ROOT / "tests" / "snapshots"
REGISTRIES = {
    "ephemeron.config.own_processes": "programs of processes, by name",
    "ephemeron.functions.entries": "entries of functions, by name",
    "ephemeron.functions.registry": "providers of platforms, by name",
    "ephemeron.runs.kinds": "kinds of runs, by name",
    "ephemeron.functions.tasks.resolver": "what makes a task of its description, by name",
}
"""Modules whose strings may name modules; lazy names of a package's `__init__` may, too."""


EVERYWHERE = ("--verbose", "--log-level", "--help")
"""Options of every command."""


@dataclass
class Module:
    """What a module says of the others of its package."""

    is_package: bool
    imports: set[str] = field(default_factory=set)
    """`module` or `module.name`, at the top or in a function, not for type checkers alone."""
    strings: list[str] = field(default_factory=list)
    """Names of modules, or `module:name`, in strings."""
    lazy: dict[str, str] = field(default_factory=dict)
    """Of a package with `__getattr__`: by name, the module that has it."""


class Structure:
    """Reads the sources below a package's folder; imports nothing.

    Args:
        folder: of the package, whose name is the folder's.
    """

    def __init__(self, folder: Path = PACKAGE) -> None:
        paths = {_name(path, folder): path for path in sorted(folder.rglob("*.py"))}
        self._names = frozenset(paths)
        self.modules = {name: self._read(name, path) for name, path in paths.items()}

    def climbing_strings(self, registries: Any = REGISTRIES) -> list[tuple[str, str]]:
        """Modules outside of registries and of lazy packages, and what their strings name."""
        return sorted(
            {
                (name, said)
                for name, module in self.modules.items()
                if name not in registries and not module.lazy
                for said in module.strings
                if said.partition(":")[0] != name
            }
        )

    def circles(self) -> list[list[str]]:
        """Groups of modules that need each other, through imports or strings, the largest first."""
        users = {name: self._needs(name) for name in self.modules}
        return sorted((sorted(c) for c in _components(users) if len(c) > 1), key=lambda c: (-len(c), c))

    def folders(self) -> Counter[str]:
        """Modules in each folder, those of its subfolders not included."""
        return Counter(name if m.is_package else name.rpartition(".")[0] for name, m in self.modules.items())

    def _needs(self, name: str) -> set[str]:
        module, found = self.modules[name], set()
        for said in module.imports:
            found |= self._resolve(said, whole=False)
        if not module.lazy and name not in REGISTRIES:
            for said in module.strings:
                found |= self._resolve(said.replace(":", "."), whole=":" not in said)
        return found - {name}

    def _resolve(self, said: str, *, whole: bool) -> set[str]:
        """Modules behind `module.name`; `whole`: of a lazy package, all that it can give."""
        if said in self._names:
            lazy = self.modules[said].lazy if whole else {}
            return {said, *lazy.values()}
        package, _, attribute = said.rpartition(".")
        if package not in self._names:
            return set()
        home = self.modules[package].lazy.get(attribute)
        return {package} if home is None else {package, home}

    def _read(self, name: str, path: Path) -> Module:
        tree = ast.parse(path.read_text())
        found = Module(is_package=path.name == "__init__.py")
        is_lazy = found.is_package and any(isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in tree.body)
        for node in _running(tree):
            if isinstance(node, ast.Import):
                found.imports.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = name.split(".") if found.is_package else name.split(".")[:-1]
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                found.imports.update(f"{base}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                for said in node.value.split(","):
                    if (module := said.partition(":")[0]) in self._names and "." in module:
                        found.strings.append(said)
            elif is_lazy and isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                        for home in (str(value.value), f"{name}.{value.value}"):
                            if home in self._names:
                                found.lazy[str(key.value)] = home
        if is_lazy and not found.lazy:
            found.lazy["__getattr__"] = name
        return found


def abstract_methods(folder: Path = PACKAGE) -> Iterator[tuple[str, list[str]]]:
    """Classes of the package, and the abstract methods that each declares itself."""
    for text in (path.read_text() for path in sorted(folder.rglob("*.py"))):
        for node in ast.walk(ast.parse(text)) if "abstractmethod" in text else ():
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
                yield node.name, [each.name for each in methods if any("abstractmethod" in ast.unparse(d) for d in each.decorator_list)]


def _name(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but those for type checkers alone, and documentation."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                todo += child.orelse
            elif not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                todo.append(child)


def _components(users: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components (Tarjan 1972), without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[set[str]] = []
    for root in users:
        work = [(root, iter(sorted(users[root])))] if root not in index else []
        while work:
            name, others = work[-1]
            if name not in index:
                index[name] = low[name] = len(index)
                stack.append(name)
                on_stack.add(name)
            for other in others:
                if other not in index:
                    work.append((other, iter(sorted(users[other]))))
                    break
                if other in on_stack:
                    low[name] = min(low[name], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    found.append(set())
                    while name not in found[-1]:
                        on_stack.discard(stack[-1])
                        found[-1].add(stack.pop())
    return found


# -- what users see -----------------------------------------------------------------------------------------------


def public_names() -> str:
    """Names of each public package, a line each: `package: names`."""
    lines = []
    for name, module in sorted(Structure().modules.items()):
        if module.is_package and (names := getattr(importlib.import_module(name), "__all__", None)):
            lines.append(f"{name}: {' '.join(sorted(names))}")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every command with its arguments and options, and the kinds of their values."""
    from ephemeron.cli.main import main

    lines: list[str] = []

    def describe(command: click.Command, words: list[str]) -> None:
        lines.append(" ".join(words))
        with click.Context(command, info_name=words[-1]) as context:
            for parameter in command.get_params(context):
                if getattr(parameter, "hidden", False) or parameter.opts[-1] in EVERYWHERE:
                    continue
                names = [] if isinstance(parameter, click.Argument) else [*parameter.opts, *parameter.secondary_opts]
                values = [] if getattr(parameter, "is_flag", False) else [parameter.make_metavar(context)]
                lines.append(f"    {' '.join([*names, *values])}")
            if isinstance(command, click.Group):
                for name in command.list_commands(context):
                    child = command.get_command(context, name)
                    assert child is not None
                    if not child.hidden:
                        describe(child, [*words, name])

    describe(main, ["ephemeron"])
    return "\n".join(lines) + "\n"


def wheel() -> str:
    """What the wheel contains: modules of each folder, and files that are no modules."""
    modules: dict[str, int] = defaultdict(int)
    others = []
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            place = path.relative_to(PACKAGE.parent)
            if path.suffix == ".py":
                modules["/".join(place.parts[:2]) if len(place.parts) > 2 else place.parts[0]] += 1
            else:
                others.append(str(place))
    return "\n".join([*sorted(modules), *others]) + "\n"


def keys(document: Any, at: str = "") -> Iterator[str]:
    """Paths of the keys of a JSON document; `[]` stands for the items of a list, `*` for keys that are no identifiers."""
    if isinstance(document, dict):
        for key, value in document.items():
            here = f"{at}.{key}" if str(key).replace("-", "_").isidentifier() else f"{at}.*"
            yield here.lstrip(".")
            yield from keys(value, here)
    elif isinstance(document, list):
        for value in document:
            yield from keys(value, f"{at}[]")


def documents(folder: Path) -> dict[str, list[Any]]:
    """What commands print with `--json`, by command, and the events of a run, by kind.

    Args:
        folder: an empty one, which has the home folder for as long as the commands run.
    """
    from click.testing import CliRunner

    from ephemeron.cli.main import main

    job, planned = str(ROOT / "examples/digits/job.toml"), ROOT / "examples/superresolution"
    asked = {
        "train": ["train", job, "--platform", "simulated", "--epochs", "1", "--workers", "2", "--aggregators", "1"],
        "runs": ["runs"],
        "runs clean": ["runs", "clean", "--dry-run"],
        "plan": ["plan", str(planned / "job.toml"), "--profile", str(planned / "profile.json"), "--platform", "aws"],
        "map --dry-run": ["map", "math:sqrt", "--items", "items.jsonl", "--dry-run"],
        "tune --dry-run": ["tune", str(ROOT / "examples/digits/study.toml"), "--dry-run"],
        "cloud list": ["cloud", "list"],
    }
    found: dict[str, list[Any]] = {}
    runner = CliRunner(env={"EPHEMERON_HOME": str(folder / "home")})
    with contextlib.chdir(folder):
        Path("items.jsonl").write_text("1\n4\n9\n")
        for name, words in asked.items():
            done = runner.invoke(main, [*words, "--json"])
            assert done.exit_code == 0, done.output
            found[name] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        events = next((folder / "home").rglob("events.jsonl"))
        for event in map(json.loads, events.read_text().splitlines()):
            found.setdefault(f"event {event['kind']}", []).append(event)
    return found


def json_keys() -> str:
    """Keys of the JSON documents of commands, a line each: `command: key.key`."""
    with tempfile.TemporaryDirectory() as folder:
        found = documents(Path(folder))
    lines = sorted({f"{name}: {key}" for name, many in found.items() for document in many for key in keys(document)})
    return "\n".join(lines) + "\n"


TAKEN = {"names.txt": public_names, "commands.txt": commands, "wheel.txt": wheel, "json-keys.txt": json_keys}


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for file, take in TAKEN.items():
        (SNAPSHOTS / file).write_text(take())
        print(SNAPSHOTS / file)
