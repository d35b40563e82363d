"""Modules that are edited while their program runs: functions compute what the program's own process would."""

from __future__ import annotations

import importlib
import sys
import zipfile
from io import BytesIO

import pytest

from ephemeron.executor import FunctionExecutor
from ephemeron.executor.shipping import Shipper
from ephemeron.functions.shipped_code import CodeKeys, decode_function


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes modules of a folder, and imports or reloads them."""
    folder = tmp_path / "mods"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # whose times have seconds
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    names = []

    def write(name, text, *, load=True):
        (folder / f"{name}.py").write_text(text)
        if not load:
            return sys.modules.get(name)
        importlib.invalidate_caches()
        names.append(name)
        return importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def sent(shipper, function):
    """Reference, and contents of the files that are sent with a function."""
    for bundled in shipper._bundles.values():
        bundled.quiet_s = 0.0  # look at the files, however soon
    shipment = shipper.ship(function)
    keys = CodeKeys("r.code")
    header, _ = decode_function(shipment.objects[keys.function(shipment.reference)], key="k")
    files = {}
    for digest in header.bundles:
        with zipfile.ZipFile(BytesIO(shipment.objects[keys.bundle(digest)])) as archive:
            files |= {info.filename.partition("/")[2]: archive.read(info).decode() for info in archive.infolist()}
    return shipment.reference, {name: text for name, text in files.items() if name}


def test_a_reloaded_module_is_another_function(module):
    shipper = Shipper(CodeKeys("r.code"))
    first = sent(shipper, module("edited_one", "def f(): return 1\n").f)
    assert sent(shipper, sys.modules["edited_one"].f) == first
    again = sent(shipper, module("edited_one", "def f(): return 2\n").f)
    assert first[1] == {"edited_one.py": "def f(): return 1\n"}
    assert again[1] == {"edited_one.py": "def f(): return 2\n"}
    assert first[0] != again[0]


def test_a_module_that_another_one_uses_counts_too_by_name_and_by_value(module):
    shipper = Shipper(CodeKeys("r.code"))
    used = module("used_one", "K = 1\n")
    function = module("using_one", "import used_one\ndef f(): return used_one.K\n").f
    by_value = lambda: used.K  # noqa: E731 - sent by value
    before = sent(shipper, function)[0], sent(shipper, by_value)[0]
    module("used_one", "K = 22\n")
    after = sent(shipper, function), sent(shipper, by_value)
    assert {found[1]["used_one.py"] for found in after} == {"K = 22\n"}
    assert not {found[0] for found in after} & set(before)


def test_an_edit_without_a_reload_changes_nothing_and_is_told(module, caplog):
    shipper = Shipper(CodeKeys("r.code"))
    function = module("waiting_one", "def f(): return 1\n").f
    first = sent(shipper, function)
    module("waiting_one", "def f(): return 2  # not reloaded\n", load=False)
    assert sent(shipper, function) == first
    assert sent(Shipper(CodeKeys("r.code")), function) == first  # another executor of this process
    assert [r.message for r in caplog.records if "waiting_one.py was edited" in r.message] == [caplog.records[-1].message]
    importlib.reload(sys.modules["waiting_one"])
    assert "return 2" in sent(shipper, sys.modules["waiting_one"].f)[1]["waiting_one.py"]


def test_an_edit_before_the_first_look_is_told(module, caplog):
    function = module("early_one", "def f(): return 1\ndef g():\n    return [n for n in (1, 2)]\n").f
    module("early_one", "# a comment, further down\n\ndef f(): return 1\ndef g():\n    return [n for n in (1, 2)]\n", load=False)
    sent(Shipper(CodeKeys("r.code")), function)
    assert not caplog.records
    function = module("early_two", "def f(): return 1\n").f
    module("early_two", "def f(): return 2\n", load=False)
    assert "return 2" in sent(Shipper(CodeKeys("r.code")), function)[1]["early_two.py"]
    assert "early_two.py seems to have changed since early_two was imported" in caplog.text


def test_files_that_modules_read_are_sent_as_they_are(module, tmp_path):
    shipper = Shipper(CodeKeys("r.code"))
    function = module("reading_one", "def f(): return 1\n").f
    sent(shipper, function)
    (tmp_path / "mods" / "table.txt").write_text("new")
    assert sent(shipper, function)[1]["table.txt"] == "new"


@pytest.mark.slow
def test_a_warm_function_runs_the_reloaded_module(module):
    one = module("warm_one", "def f(): return 1\n")
    with FunctionExecutor("local", max_workers=1, retries=0, idle_timeout_s=120) as pool:
        assert pool.submit(one.f).result(120) == 1
        assert pool.submit(lambda: one.f()).result(120) == 1
        module("warm_one", "def f(): return 2\n")
        assert pool.submit(one.f).result(120) == 2
        assert pool.submit(lambda: one.f()).result(120) == 2
        module("warm_one", "def f(): return 3\n", load=False)
        assert pool.submit(one.f).result(120) == one.f() == 2
        assert pool.bill().invocations == 1


def test_an_environment_within_the_folder_is_not_looked_at(module, tmp_path, monkeypatch, caplog):
    from ephemeron.config import imported_sources

    module("edited_with_environment", "def f(): return 1\n")
    environment = module("edited_installed", "def g(): return 1\n")
    path = tmp_path / "mods" / ".venv" / "lib" / "edited_installed.py"
    path.parent.mkdir(parents=True)
    path.write_text("def g(): return 2\n")
    monkeypatch.setattr(environment, "__file__", str(path))
    monkeypatch.setattr(environment.__spec__, "origin", str(path))
    monkeypatch.setattr(imported_sources, "_installed", lambda: (path.parent,))
    assert imported_sources.edited_since(tmp_path / "mods") == {}
    assert str(path) not in imported_sources._seen
    assert "seems to have changed" not in caplog.text
