"""Runs the tests that a change can touch: `make test-changed`, or `python tests/affected.py [--base COMMIT] [--lane fast] [--list]`.

Changed is what differs from the base, the working tree included. The base is where this branch left `main`; on `main` itself, with nothing
uncommitted, the commit before. A file depends on

- what it imports: modules of the package, of `benchmarks` and of `tests`, with the `__init__.py` on the way. A name that a package only
  imports when it is used (`__getattr__`) stands for the module that has it;
- what its strings name: `"ephemeron.regions.exchange"` in a registry, `f"ephemeron.functions.{name}"` (all below), programs in strings;
- `conftest.py` of its folder and of those above, if it is a test;
- files that are no modules and that it names: `"job.schema.json"`; templates and scripts belong to the package around them.

Strings are counted because registries and lazy names carry most of the dependencies that the layers forbid as imports. Libraries for
import graphs see neither, and tests are in no package. Imports for type checkers alone do not count. Tests that read sources as text are
listed in `READERS`. What only data connects (an entry point that a job file of another test names) is not seen: all of `make test-all`
has to pass before a change lands.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
EVERYTHING = ("pyproject.toml", "constraints.txt")
READERS = {
    "tests/cli/test_terminal.py": ("src/ephemeron/cli/*",),
    "tests/test_affected.py": ("src/*.py", "tests/*.py"),
    "tests/test_documentation.py": ("*.md", "src/*.py", "benchmarks/*.py", "examples/*"),
    "tests/test_documentation_blocks.py": ("docs/*.md", "examples/*"),
    "tests/test_errors.py": ("src/*.py",),
    "tests/test_imports.py": ("src/*.py",),
    "tests/test_mutants.py": ("src/*.py", "tests/*.py"),
    "tests/test_nightly.py": ("tests/*.py",),
    "tests/test_quarantined_tests.py": ("src/*.py", "tests/*.py"),
    "tests/test_structure.py": ("src/*",),
}
"""Tests that look into files whose names they do not have: patterns of what they read."""
PACKAGES = {"ephemeron": "src/ephemeron", "benchmarks": "benchmarks"}
DOTTED = re.compile(r"\b(?:ephemeron|benchmarks)(?:[.:]\w+)+\.?|^benchmarks\.$")
FROM = re.compile(r"\bfrom +((?:ephemeron|benchmarks)[\w.]*) +import +\(?([\w, \n]+)")
COMMAND = re.compile(r"""sys\.executable\)(\.with_name\(|\.parent */ *)["']ephemeron["']""")
"""The installed command, which runs `ephemeron.cli.main`."""


def _says_nothing(node: ast.AST) -> bool:
    """Documentation, and names that are not imported by what they are given to."""
    if isinstance(node, ast.Call):
        return _dotted(node.func) == "pytest.register_assert_rewrite"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@dataclass
class Read:
    """What a module says of others."""

    names: set[str] = field(default_factory=set)
    """Imported when the module is, or by a function of it: `package.module.attribute`."""
    lazy: set[str] = field(default_factory=set)
    """Of a package with `__getattr__`: names in strings and in functions, for users of a name of it that has no home here."""
    homes: dict[str, str] = field(default_factory=dict)
    """Of a package: what it imports from elsewhere, for type checkers or not."""
    words: set[str] = field(default_factory=set)
    """Parts of the paths in its strings, and `module:` of `module:attribute`."""


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Names that an import binds, and what they are; `package` is around the module, for relative imports."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name, alias.name
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield alias.asname or alias.name, f"{module}.{alias.name}"


def read(text: str, package: str = "", is_package: bool = False) -> Read:
    """Reads a module.

    Args:
        text: of the module.
        package: that it is in (or is, `is_package`), empty for tests.
    """
    found = Read()
    tree = ast.parse(text)
    is_lazy = is_package and any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    todo: list[tuple[ast.AST, bool, bool]] = [(tree, False, True)]
    """Node, in a function, and whether it runs."""
    while todo:
        node, inside, runs = todo.pop()
        names = found.lazy if is_lazy and inside else found.names
        if isinstance(node, ast.Import | ast.ImportFrom):
            for bound, name in _imported(node, package):
                if is_package:
                    found.homes.setdefault(bound, name)
                if runs:
                    names.add(name)
        elif isinstance(node, ast.Attribute):
            if (name := _dotted(node)).startswith(("ephemeron.", "benchmarks.")):
                names.add(name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings = found.lazy if is_lazy else found.names
            said = node.value
            if said == WHOLE_PROGRAM:
                continue
            if "ephemeron" in said or "benchmarks" in said:
                strings.update(name.replace(":", ".") for name in DOTTED.findall(said))
                strings.update(f"{module}.{name.strip()}" for module, many in FROM.findall(said) for name in many.split(","))
            if is_lazy:
                strings.add(f"{package}.{said}")
            if len(said) < 200:
                found.words.update(said.split("/"), [f"{said.partition(':')[0]}:"] if ":" in said else [])
        elif _says_nothing(node):
            continue
        inside |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        checked = isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING")
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    todo.append((child, inside, runs and not (checked and name == "body")))
    if COMMAND.search(text):
        found.names.add("ephemeron.cli.main")
    return found


WHOLE_PROGRAM = "ephemeron.cli.main"
"""In the table of processes of their own, for commands that are given again: few tests do that, and those import it."""


class Graph:
    """Which file depends on which.

    Args:
        root: of the repository.
        files: of the repository, relative to it; what was deleted may be among them, for those who still name it.
    """

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.root = root
        self.files = sorted(files)
        self._modules = {name: path for path in self.files if (name := _module(path))}
        self._helpers = {
            PurePosixPath(path).stem: path
            for path in self.files
            if path.startswith("tests/") and path.endswith(".py") and not path.endswith("/conftest.py")
        }
        self._read: dict[str, Read] = {}
        for path in self.files:
            if path.endswith(".py"):
                package, is_package = _package(path), path.endswith("/__init__.py")
                try:
                    self._read[path] = read((root / path).read_text(), package, is_package)
                except (OSError, SyntaxError):
                    self._read[path] = Read()

    @cached_property
    def needs(self) -> Mapping[str, set[str]]:
        """By file, those that it depends on."""
        needs: dict[str, set[str]] = defaultdict(set)
        for path, said in self._read.items():
            for name in said.names:
                needs[path] |= self._resolve(name)
                if path.startswith("tests/") and (helper := self._helpers.get(name.partition(".")[0])):
                    needs[path].add(helper)
            if path.startswith("tests/"):
                needs[path] |= {conftest for folder in PurePosixPath(path).parents if (conftest := f"{folder}/conftest.py") in self._read}
        for path in self.files:
            for reader in self._readers(path):
                needs[reader].add(path)
        for path in needs:
            needs[path].discard(path)
        return needs

    @property
    def tests(self) -> list[str]:
        """Test modules."""
        return [path for path in self.files if _is_test(path) and (self.root / path).exists()]

    def affected(self, changed: Iterable[str]) -> dict[str, list[str]]:
        """By test module that a change can touch, a shortest chain from it to a changed file; both ends are in it."""
        changed = sorted(changed)
        if whole := [path for path in changed if path in EVERYTHING]:
            return {test: [test, whole[0]] for test in self.tests}
        users: dict[str, set[str]] = defaultdict(set)
        for path, needed in self.needs.items():
            for other in needed:
                users[other].add(path)
        chains = {path: [path] for path in changed}
        for test, patterns in READERS.items():  # what they read is not what it depends on
            if read := [path for path in changed if any(fnmatch(path, pattern) for pattern in patterns)]:
                chains.setdefault(test, [test, read[0]])
        todo = deque(changed)
        while todo:
            path = todo.popleft()
            for user in sorted(users[path] - chains.keys()):
                chains[user] = [user, *chains[path]]
                todo.append(user)
        return {test: chains[test] for test in self.tests if test in chains}

    def _resolve(self, name: str) -> set[str]:
        """Files behind `package.module.attribute`, those on the way included."""
        whole = name.endswith(".")  # the rest is made at run time
        parts = name.rstrip(".").split(".")
        if parts[0] not in PACKAGES:
            return set()
        found: set[str] = set()
        for n in range(1, len(parts) + 1):
            path = self._modules.get(".".join(parts[:n]))
            if path is None:
                return found | self._attribute(".".join(parts[: n - 1]), parts[n - 1], ".".join(parts[n:]))
            found.add(path)
        if whole:
            found |= {path for module, path in self._modules.items() if module.startswith(name)}
        return found

    def _attribute(self, package: str, name: str, rest: str) -> set[str]:
        """Files behind a name that a package imports from elsewhere."""
        said = self._read.get(self._modules.get(package, ""))
        if said is None:
            return set()
        home = said.homes.get(name)
        if home is not None and not f"{home}.".startswith(f"{package}.{name}."):
            return self._resolve(f"{home}.{rest}" if rest else home)
        if said.lazy and not name.startswith("__"):
            return set().union(*(self._resolve(other) for other in said.lazy if other.rstrip(".") in self._modules))
        return set()

    @cached_property
    def _saying(self) -> Mapping[str, set[str]]:
        """By word in strings, who says it."""
        saying: dict[str, set[str]] = defaultdict(set)
        for path, said in self._read.items():
            for word in said.words:
                saying[word].add(path)
        return saying

    def _readers(self, path: str) -> set[str]:
        """Who depends on a file that they don't import."""
        at, folder = PurePosixPath(path), str(PurePosixPath(path).parent)
        if _is_test(path) or at.name in ("conftest.py", "__init__.py"):
            return set()
        found = self._saying[at.name] | self._saying[f"{at.stem}:"]
        if _module(path):
            found = {other for other in found if other.startswith(f"{folder}/")}
        beside = self._folders.get(folder, ())
        if path.endswith(".py") and not any(_is_test(other) or other.endswith("/__init__.py") for other in beside):
            around = f"{at.parent.parent}/"  # a folder of programs
            found |= {other for other in self._saying[at.parent.name] if other.startswith(around)}
        if path.startswith("examples/") and len(at.parts) > 2:
            found |= self._saying["examples"] & (self._saying[at.parts[1]] | self._without_example)
        elif path.startswith("src/") and at.suffix != ".py":
            around = next(str(folder) for folder in at.parents if str(folder) in self._folders)
            if around not in PACKAGES.values():
                found |= self._folders[around]
        return found

    @cached_property
    def _folders(self) -> Mapping[str, set[str]]:
        """Python files by folder."""
        folders: dict[str, set[str]] = defaultdict(set)
        for path in self._read:
            folders[str(PurePosixPath(path).parent)].add(path)
        return folders

    @cached_property
    def _without_example(self) -> set[str]:
        """Who says "examples" and no name of one."""
        names = {part for path in self.files if path.startswith("examples/") for part in path.split("/")[1:]}
        return {path for path in self._saying["examples"] if not names & self._read[path].words}


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).name.startswith("test_") and path.endswith(".py")


def _module(path: str) -> str:
    """Its name, if it is in a package."""
    for package, folder in PACKAGES.items():
        if path.startswith(f"{folder}/") and path.endswith(".py"):
            parts = path.removesuffix(".py").removeprefix(f"{folder}/").split("/")
            return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
    return ""


def _package(path: str) -> str:
    name = _module(path)
    return name if path.endswith("/__init__.py") else name.rpartition(".")[0]


def _git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def changes(root: Path, base: str | None) -> tuple[str, list[str]]:
    """The base in words, and the files that differ from it."""
    uncommitted = _git(root, "ls-files", "--others", "--exclude-standard")
    if base is None:
        branches = _git(root, "for-each-ref", "--format=%(refname:short)", "refs/heads/main", "refs/remotes/origin/main")
        base = _git(root, "merge-base", branches[0], "HEAD")[0] if branches else "HEAD~1"
        head = _git(root, "rev-parse", "HEAD")[0]
        if base == head and not uncommitted and not _git(root, "diff", "--name-only", "HEAD"):
            base = "HEAD~1"
    differing = _git(root, "diff", "--name-only", "--no-renames", base)
    return _git(root, "log", "-1", "--format=%h %s", base)[0], sorted({*differing, *uncommitted})


def described(changed: Sequence[str], selected: Mapping[str, Sequence[str]], graph: Graph) -> Iterator[str]:
    """What changed and what is selected, in lines."""
    yield f"{len(changed)} changed:" if changed else "nothing changed"
    yield from (f"    {path}" for path in changed[:20])
    if len(changed) > 20:
        yield f"    and {len(changed) - 20} more"
    yield f"{len(selected)} of {len(graph.tests)} test modules can be touched by it"
    if selected:
        longest = max(selected.values(), key=len)
        yield "the longest chain: " + " -> ".join(longest)
    reached = {chain[-1] for chain in selected.values()}
    if alone := [path for path in changed if path not in reached and not graph.affected([path])]:
        yield "no test reaches " + ", ".join(alone[:20]) + (f" and {len(alone) - 20} more" if len(alone) > 20 else "")


def run(root: Path, tests: Sequence[str], lane: str, everything: bool) -> int:
    """Runs one lane of test modules; pytest's exit status, 0 if the lane has none of them."""
    if lane == "slow":
        tests = [test for test in tests if "mark.slow" in (root / test).read_text()]
    if not tests:
        print(f"\n== {lane}: none")
        return 0
    print(f"\n== {lane}", flush=True)
    processes = min(4, len(tests)) if len(tests) > 1 else 0
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        str(processes),
        "--dist",
        "loadscope",
        "--warm-starts",
        "--fail-leaks",
        "-m",
        "slow" if lane == "slow" else "not slow",
        *([] if everything else tests),
    ]
    status = subprocess.call(command, cwd=root)
    return 0 if status == 5 else status  # 5: the modules have no tests of this lane


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Says what is selected and runs it, fast tests first; the exit status is that of the first lane that fails."""
    parser = argparse.ArgumentParser(prog="python tests/affected.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--base", help="commit to compare with (default: where this branch left main)")
    parser.add_argument("--lane", choices=("fast", "slow", "both"), default="both")
    parser.add_argument("--list", action="store_true", help="print the test modules and run nothing")
    arguments = parser.parse_args(argv)
    base, changed = changes(root, arguments.base)
    graph = Graph(root, {*_git(root, "ls-files"), *changed})
    selected = graph.affected(changed)
    print(f"compared with {base}:", *described(changed, selected, graph), sep="\n", flush=True)
    if arguments.list:
        print(*selected, sep="\n")
        return 0
    for lane in ("fast", "slow") if arguments.lane == "both" else (arguments.lane,):
        if selected and (status := run(root, sorted(selected), lane, everything=len(selected) == len(graph.tests))):
            return status
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
