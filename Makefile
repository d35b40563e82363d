# Two commands do everything, on a fresh machine with Python 3.11 or newer:
#   make train    installs into .venv and trains handwritten digits on four functions
#   make test     installs into .venv and runs the tests (about ten minutes on two cores)
# `make test-all` runs the slow tests, too: all platforms and emulators end to end, kill matrices, long simulations.
# `make test-changed` runs what a change can touch, `make test-repeat` one test many times, `make test-nightly` an hour of what takes too
# long for each landing. docs/tests.md describes them. EPHEMERON_FULL_MATRIX=1 runs all random schedules of faults instead of a third.
# PYTHON chooses the interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LANE := $(BIN)/python -m pytest -n 4 --dist loadscope --warm-starts --fail-leaks

.PHONY: train test test-slow test-all test-times test-changed test-repeat test-nightly lint types layers clean

train: $(VENV)/train.stamp
	$(BIN)/ephemeron train examples/digits/job.toml --out out

test: $(VENV)/test.stamp $(VENV)/emulator.stamp
	$(LANE) -m "not slow"

test-slow: $(VENV)/test.stamp $(VENV)/emulator.stamp
	$(LANE) -m slow $(if $(UNTIL),--begin-until $(UNTIL))

test-all: $(VENV)/test.stamp $(VENV)/emulator.stamp
	$(LANE)

# Duration, CPU seconds, processes and memory of every test of both lanes (tests/measuring.py).
test-times: $(VENV)/test.stamp $(VENV)/emulator.stamp
	$(LANE) -m "not slow" --times tests/times/fast.json
	$(LANE) -m slow --times tests/times/slow.json

# What a change can touch, by the graph of imports: against where this branch left main, or BASE=commit. LANE=fast, LANE=slow or both.
test-changed: $(VENV)/test.stamp $(VENV)/emulator.stamp
	$(BIN)/python tests/affected.py $(if $(BASE),--base $(BASE)) --lane $(or $(LANE),both)

# One test N times, on J processes, until it fails: make test-repeat TEST=tests/path.py::name N=200. Nothing is tried a second time.
test-repeat: $(VENV)/test.stamp $(VENV)/emulator.stamp
	$(BIN)/python tests/repeating.py '$(TEST)' --count $(or $(N),200) --jobs $(or $(J),1)

# What takes too long for each landing, within an hour: NIGHTLY="--minutes 6 --only mutants soak" for parts of it.
test-nightly: $(VENV)/test.stamp $(VENV)/emulator.stamp
	$(BIN)/python tests/nightly.py $(NIGHTLY)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(VENV)/dev.stamp
	$(BIN)/mypy

layers: $(VENV)/dev.stamp
	$(BIN)/lint-imports

$(VENV)/%.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

# Amazon's emulator of Lambda lies in its command line, whose dependencies are not wanted here. Its tests can do without.
$(VENV)/emulator.stamp: $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'aws-sam-cli>=1.170' \
		|| echo "no emulator of Lambda: its tests will be skipped"
	touch $@

clean:
	rm -rf $(VENV) out
