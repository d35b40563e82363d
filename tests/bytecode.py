"""Compiles test modules and the package once, ahead of a run with several processes (pytest-xdist).

All processes collect the same modules in the same order at the same time, so in a fresh checkout each of them would rewrite and
compile all of them: some 15 CPU seconds per process.
"""

from __future__ import annotations

import compileall
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from _pytest.assertion import AssertionState, rewrite


def compile_ahead(config: pytest.Config, modules: list[Path]) -> None:
    """Writes the bytecode of `modules` where Python and pytest look for it; what is current is left as it is.

    A module that cannot be compiled is left to its import, which says why; so is one whose folder cannot be written. The functions of pytest are its private ones: with
    a pytest that has others, nothing is written ahead.
    """
    if any(not hasattr(rewrite, name) for name in ("PYC_TAIL", "_read_pyc", "_rewrite_test", "_write_pyc", "get_cache_dir")):
        return
    processes = os.cpu_count() or 1
    with ProcessPoolExecutor(processes, mp_context=get_context("fork"), initializer=_set, initargs=(config,)) as pool:
        for _ in pool.map(_compiled, modules, chunksize=8):
            pass


_config: pytest.Config


def _set(config: pytest.Config) -> None:
    global _config
    _config = config


def _compiled(module: Path) -> None:
    """One module; those whose assertions pytest rewrites are `test_*.py` and `conftest.py`."""
    if not module.name.startswith("test_") and module.name != "conftest.py":
        compileall.compile_file(module, quiet=2)
        return
    folder = rewrite.get_cache_dir(module)
    written = folder / (module.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(module, written) is not None:
        return
    try:
        stamp, code = rewrite._rewrite_test(module, _config)
        folder.mkdir(parents=True, exist_ok=True)
    except (SyntaxError, OSError):
        return
    rewrite._write_pyc(AssertionState(_config, "rewrite"), code, stamp, written)
