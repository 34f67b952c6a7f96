# make demo      the main job, on five real servers of its own
# make test      lint and the whole suite, on real servers
# make package   build the sdist and the wheel, check them, and use the wheel in an empty environment
# make smoke     each kind of lock, with the lowest and with the newest version of each dependency
# make mutants   each line of the scripts is needed: every change of them, not some; and more random histories
# make explore  all orders of events in small worlds: the models of spec/, and the shipped client (ARGS="--within 30")
# make simulate the shipped client in virtual time: an hour for each seed, from a new base (SEEDS=60)
# make stack     the same with the real client over simulated sockets and servers: six runs of a minute for each seed
# make calm      the whole suite ten times in a row, three times beside two busy loops: is it ever red by chance?
# make drivers   each kind of lock over psycopg and aiomysql, which users may name in a url
# make failovers a PostgreSQL primary fails under load, in eight ways: double holders, tokens, how long nobody enters
# make chaos     links between single clients and nodes fail, nodes freeze and die: no two holders (SECONDS=60)
# make compose   the five nodes of docker-compose.yml: killed, paused and cut off under load; needs an engine
# make services  install the other servers that the tests start, from Debian's packages
# make test-all  the short suite on each interpreter of this machine, from 3.11 on
# Each makes the virtual environments that it needs; a Python of 3.11 or later is all they need.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := python -m pip install --quiet --disable-pip-version-check
WORKERS := 12 # six for each of the two cores of CI: most of the time is spent waiting for servers and leases
# One stamp per set of extras, so that the demo need not wait for the tests' tools.
CLI := $(VENV)/installed-cli
TEST := $(VENV)/installed-test
BENCH := $(VENV)/installed-bench
RELEASE := $(VENV)/installed-release

.PHONY: demo test lint compile check mutants explore simulate stack calm drivers failovers chaos compose services package smoke test-all bench clean

demo: $(CLI)
	$(BIN)/asynclock demo

# mypy uses one core; meanwhile the other one compiles the tests. In a fresh clone each worker would compile them all.
test: $(TEST)
	$(MAKE) --no-print-directory -j 2 lint compile
	$(MAKE) --no-print-directory check

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Without its bytecode each worker would compile every module anew, whatever the shell says.
check compile: export PYTHONDONTWRITEBYTECODE :=
compile: $(TEST)
	@$(BIN)/python -m pytest --collect-only -q > /dev/null || true  # check tells the errors

check: $(TEST)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

# Every change of the scripts, where `make test` tries one in 120; and more random histories. Eight minutes.
mutants: $(TEST)
	ASYNCLOCK_MUTANTS=all $(BIN)/python -m pytest -n 3 -o faulthandler_timeout=0 \
		tests/agreement/test_mutex_mutants.py tests/agreement/test_shared_mutants.py
	ASYNCLOCK_EXAMPLES=700 $(BIN)/python -m pytest -n 3 -o timeout=1200 -o faulthandler_timeout=0 \
		tests/agreement/test_mutex_agreement.py tests/agreement/test_shared_agreement.py \
		tests/agreement/test_multi_agreement.py

# Three minutes. ARGS=machine:closes for one scene.
explore: $(TEST)
	$(BIN)/python -m spec --jobs 0 $(ARGS)

# Two minutes. ARGS="--base 7 --run 3" repeats a run.
SEEDS := 60
simulate: $(TEST)
	$(BIN)/python -m simulation --jobs 0 --seeds $(SEEDS) $(ARGS)

# Two minutes. ARGS="--base 7 --run 3" repeats a run.
stack: $(TEST)
	$(BIN)/python -m simulation.stack --jobs 0 --seeds $(SEEDS) $(ARGS)

# An hour. ARGS="--runs 1 --busy 0" is one run, with its time.
calm: $(TEST)
	$(BIN)/python -m tests.support.calm $(ARGS) -- $(MAKE) --no-print-directory check ARGS=

# Half a minute.
drivers: $(TEST)
	ASYNCLOCK_DRIVERS=all $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -k "psycopg or aiomysql" tests $(ARGS)

# Three minutes. ARGS=--driver=postgresql+psycopg for another driver.
failovers: $(TEST)
	set -e; for replication in sync async; do for how in crash mute second returns; do \
		$(BIN)/python -m tests.support.failovers $$replication $$how $(ARGS); done; done

# ARGS="--seed 7" repeats a schedule; --durable, --store postgresql and --store zookeeper are other runs.
# A user who is not root gets a container. ARGS=--if-possible is no error where there is none, or no network namespaces.
SECONDS := 60
chaos: $(TEST)
	$(BIN)/python -m tests.support.chaos --seconds $(SECONDS) $(ARGS)

# Half a minute. Without an engine or an image each test is skipped, and says why.
compose: $(TEST)
	$(BIN)/python -m pytest -x tests/compose/nodes.py $(ARGS)

services:
	tests/support/services/install.sh

# The sdist is the source of the wheel, so both are complete if the wheel works. DIST is emptied first.
DIST := build/dist
EMPTY := build/empty
package: $(RELEASE)
	rm -rf $(DIST) $(EMPTY)
	$(BIN)/python -m build --quiet --outdir $(DIST) .
	$(BIN)/python -m twine check --strict $(DIST)/*
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/$(PIP) $(DIST)/*.whl
	$(EMPTY)/bin/python tests/support/smoke.py

# The lowest versions may have no wheels for the newest interpreters.
OLDEST = $(shell for python in python3.11 python3.12 python3.13 $(PYTHON); do \
	$$python -c 'import venv, ssl' 2>/dev/null && echo $$python && break; done)
# FastAPI has forms only with python-multipart, which no extra needs.
EXTRAS := embedded cli otel fastapi aiohttp examples sqlite postgresql mysql zookeeper
smoke: package $(TEST)
	$(BIN)/python tests/support/lowest.py $(EXTRAS) > build/lowest.txt
	set -e; for versions in lowest newest; do \
		python=$(PYTHON); constraints=; \
		if [ $$versions = lowest ]; then python=$(OLDEST); constraints='-c build/lowest.txt'; fi; \
		rm -rf build/$$versions; $$python -m venv build/$$versions; \
		build/$$versions/bin/$(PIP) $$constraints "$$(echo $(DIST)/*.whl)[$$(echo $(EXTRAS) | tr ' ' ,)]" \
			python-multipart; \
		$(BIN)/python -m tests.support.services build/$$versions/bin/python tests/support/smoke.py $(EXTRAS); \
	done

# What differs between interpreters is cancellation, typing and the event loop. `make test` runs all on one of them.
SHORT := tests/unit tests/locks/test_lock.py tests/locks/test_rwlock.py tests/locks/test_multi.py \
	tests/locks/test_decorators.py tests/locks/test_event_loops.py tests/failures/test_cancel.py \
	tests/failures/test_cancel_counts.py tests/failures/test_loss_meets_cancel.py tests/stores/test_transport.py \
	tests/stores/test_forks_and_threads.py tests/stores/test_credentials.py tests/waiting/test_local_queue_hand_over.py
test-all:
	set -e; for version in 3.11 3.12 3.13 3.14; do \
		found=; for python in python$$version $(HOME)/.pyenv/versions/$$version.*/bin/python; do \
			if [ -z "$$found" ] && $$python -c 'import venv, ssl' 2>/dev/null; then found=$$python; fi; done; \
		if [ -z "$$found" ]; then echo "test-all: there is no python$$version here"; continue; fi; \
		test -d build/py$$version || $$found -m venv build/py$$version; \
		build/py$$version/bin/$(PIP) -e '.[cli,embedded,suite]'; \
		build/py$$version/bin/python -m pytest -n $(WORKERS) --dist loadgroup $(SHORT) $(ARGS); \
	done

bench: $(BENCH)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "asynclock needs Python 3.11 or later: set PYTHON=/path/to/python3"; exit 1; }
	@was=$$(test -e $(VENV) && echo yes); $(PYTHON) -m venv $(VENV) || { test "$$was" || rm -rf $(VENV); exit 1; }

$(CLI): pyproject.toml | $(VENV)/bin/python
	$(BIN)/$(PIP) -e '.[cli,embedded]'
	@touch $@

$(TEST): pyproject.toml | $(VENV)/bin/python
	$(BIN)/$(PIP) -e '.[test]'
	@touch $@

$(BENCH): pyproject.toml | $(VENV)/bin/python
	$(BIN)/$(PIP) -e '.[bench]'
	@touch $@

$(RELEASE): pyproject.toml | $(VENV)/bin/python
	$(BIN)/$(PIP) -e '.[release]'
	@touch $@
