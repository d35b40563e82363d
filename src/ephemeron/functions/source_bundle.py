"""What is deployed: this package's source, and the Python and the packages that functions have."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ephemeron.config.paths import replace_file
from ephemeron.config.typed import build, near, plain
from ephemeron.errors import JobError
from ephemeron.functions.shipped_code import python_version

REQUIREMENTS = (
    "numpy>=1.26",
    "obstore>=0.6",
    "psutil>=5.9",
    "safetensors>=0.4.3",
    "xxhash>=3.4",
    "click>=8.1",
    "rich>=13.7",
    "redis>=5.0",
    "hiredis>=2.3",
)
"""Requirements of every function: the core, and channels in a cache."""
TRAINING = ("torch>=2.4,<3", "pillow>=10", "pyarrow>=16", "cloudpickle>=3", "optuna>=4")
"""Requirements of a function that trains: the framework, decoders of data flows, and what drives a study."""
PYTHONS = ("3.11", "3.12", "3.13")
"""Versions of which platforms have base images."""
ENVIRONMENT_FILE = "environment.json"
_OWN = "ephemeron"
_EXTRA = re.compile(r"""(?P<requirement>[^;]+);\s*extra\s*==\s*['"](?P<extra>[^'"]+)['"]""")
_OWN_EXTRAS = re.compile(rf"{_OWN}\[(?P<extras>[^\]]+)\]")
_LOCAL = ("-e", "--editable", "-r", "--requirement", "-c", "--constraint", ".", "/", "file:")
"""Beginnings of lines that name files, which the build of an image does not have."""
_UNNEEDED = (("testing",), ("dashboard",), ("partition", "report"))
"""Packages that functions do not import, also where they drive a run and write its report."""


def sources() -> Iterator[tuple[str, Path]]:
    """Every file of this package that a function may need, by its name below `ephemeron/`."""
    root = Path(__file__).parents[1]
    left_out = {root.joinpath(*parts) for parts in _UNNEEDED}
    found: list[tuple[str, Path]] = []
    for folder, below, files in os.walk(root):
        here = Path(folder)
        below[:] = [name for name in below if name != "__pycache__" and here / name not in left_out]
        inside = here.relative_to(root).as_posix()
        found += [(name if here == root else f"{inside}/{name}", here / name) for name in files]
    yield from sorted(found, key=lambda entry: entry[0].split("/"))


@functools.cache
def digest() -> str:
    """Digest of the deployed code: client and function must be of the same release. Computed once per process, whose code stays."""
    hashed = xxhash.xxh3_64()
    for name, path in sources():
        hashed.update(name.encode() + b"\0")
        hashed.update(path.read_bytes())
    return str(hashed.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionEnvironment:
    """Python and packages of deployed functions."""

    python: str = ""
    """Version, such as `3.12`; empty: the client's."""
    packages: tuple[str, ...] = ()
    """Requirements for pip, beside those of this package."""

    @property
    def version(self) -> str:
        """Of Python."""
        return self.python or python_version()

    @property
    def release(self) -> str:
        """What a function says of its code: that client and function fit is checked by it, see `check_release`."""
        names = dict.fromkeys(name_of(line) for line in self.packages if not line.startswith("-"))
        return f"{digest()}.py{self.version}" + "".join(f"+{name}" for name in names)

    def requirements(self, own: Sequence[str]) -> str:
        """Text of requirements.txt.

        Args:
            own: requirements of this package on the platform; `packages` take the place of those with the same name.
        """
        given = {name_of(line) for line in self.packages}
        return "\n".join([*(line for line in map(_pinned, own) if name_of(line) not in given), *self.packages, ""])

    def __str__(self) -> str:
        more = f" and {', '.join(self.packages)}" if self.packages else ""
        return f"Python {self.version}{more}"


def environment_of(
    out: Path, *, python: str | None = None, requirements: Sequence[Path] = (), extras: Sequence[str] = ()
) -> FunctionEnvironment:
    """The environment of a deployment, which is kept in its folder for the next one.

    Args:
        out: folder of the deployment. Without `requirements` and `extras`, its packages stay as they were.
        python: version; None: as it was, at first the client's.
        requirements: files in the format of pip.
        extras: of this package.

    Raises:
        JobError: a file cannot be read or names files, an extra is not known, or Python is of another version.
    """
    place = out / ENVIRONMENT_FILE
    known = build(FunctionEnvironment, json.loads(place.read_bytes()), where=str(place)) if place.exists() else FunctionEnvironment()
    packages = [line for path in requirements for line in _lines(path)] + [line for extra in extras for line in extra_requirements(extra)]
    found = FunctionEnvironment(
        python=known.python if python is None else python, packages=tuple(dict.fromkeys(packages)) if packages else known.packages
    )
    if found.version not in PYTHONS:
        raise JobError(f"functions cannot have Python {found.version}", remedy=f"give --python {' or '.join(PYTHONS)}")
    if found == known:
        return found
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(place, json.dumps(plain(found), indent=2) + "\n")
    except OSError as e:
        raise JobError(f"cannot write to {out}: {e.strerror}", remedy="give another folder with --out") from None
    return found


def check_release(found: str, wanted: str, *, what: str, deploying: str) -> None:
    """Whether client and function have the same code and the same Python. What a function does not say is trusted.

    Args:
        found: what the function says, see `FunctionEnvironment.release`; empty: nothing.
        wanted: digest of this package.
        what: the function, in words.
        deploying: the command that deploys it.

    Raises:
        JobError: they are not of one release, or Python differs, in which what was pickled by value cannot be read.
    """
    code, _, rest = found.partition(".py")
    python = rest.partition("+")[0]
    if code and code != wanted:
        raise JobError(
            f"{what} runs code {code}, this is {wanted}",
            remedy=f"run `{deploying}` again, with a new image, so that both are of one release",
        )
    if python and python != python_version():
        raise JobError(
            f"{what} has Python {python}, and this is Python {python_version()}: classes and functions of one cannot be read by the other",
            remedy=f"run `{deploying} --python {python_version()}`, or use Python {python} here",
        )


def packages_in(release: str) -> frozenset[str] | None:
    """Names of the packages that a function has beside this package's own; None: it does not say.

    Args:
        release: what the function says, see `FunctionEnvironment.release`.
    """
    _, is_told, rest = release.partition(".py")
    return frozenset(filter(None, rest.split("+")[1:])) if is_told else None


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise JobError(f"requirements {path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    found = []
    for number, line in enumerate(lines, 1):
        text = re.split(r"(?:^|\s)#", line)[0].strip()
        if text.startswith(_LOCAL) or " @ file:" in text:
            raise JobError(
                f"requirements {path}, line {number}: {text!r} names a file, which the build does not have",
                remedy="name packages of an index",
            )
        found += [text] if text else []
    return found


def extra_requirements(name: str) -> list[str]:
    """Requirements of an extra of this package, and of those that it names.

    Raises:
        JobError: there is none of this name.
    """
    from importlib.metadata import requires

    found: dict[str, list[str]] = {}
    for line in requires(_OWN) or []:
        if (fits := _EXTRA.fullmatch(line.strip())) is not None:
            found.setdefault(fits["extra"], []).append(fits["requirement"].strip())
    if name not in found:
        raise JobError(f"there is no extra {name!r}", remedy=near(name, sorted(found), what="extras"))
    lines = []
    for line in found[name]:
        own = _OWN_EXTRAS.match(line)
        lines += [line] if own is None else [each for extra in own["extras"].split(",") for each in extra_requirements(extra.strip())]
    return lines


def name_of(requirement: str) -> str:
    """Normalised name of the package of a requirement."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].replace("_", "-").lower()


def _pinned(requirement: str) -> str:
    """PyTorch as the client has it, so that what it has computed is what functions compute."""
    from importlib.metadata import PackageNotFoundError, version

    if name_of(requirement) != "torch":
        return requirement
    try:
        return f"torch=={version('torch').partition('+')[0]}"
    except PackageNotFoundError:
        return requirement
