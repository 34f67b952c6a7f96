# make demo   the main job, on five real servers of its own
# make test   lint and the whole suite, on real servers
# Both make a virtual environment first; a Python of 3.11 or later is all they need.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
WORKERS := 6 # three for each of the two cores of CI: half of the time is spent waiting for servers and leases
# One stamp per set of extras, so that the demo need not wait for the tests' tools.
CLI := $(VENV)/installed-cli
TEST := $(VENV)/installed-test
BENCH := $(VENV)/installed-bench

.PHONY: demo test lint check bench clean

demo: $(CLI)
	$(BIN)/asynclock demo

test: lint check

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Without its bytecode each worker would compile every module anew, whatever the shell says.
check: export PYTHONDONTWRITEBYTECODE :=
check: $(TEST)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

bench: $(BENCH)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "asynclock needs Python 3.11 or later: set PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(CLI): pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cli]'
	@touch $@

$(TEST): pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

$(BENCH): pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@
