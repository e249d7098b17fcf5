# `make test` and `make demo` set up .venv by themselves. Another interpreter: make PYTHON=python3.12 test
# The environment stays when PYTHON changes: give VENV another folder, or `make clean` before.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test test-long test-all smoke pythons demo docs slow chaos gpu lint clean

# All tests of a file run in one process, so that its fixtures are made once. The files keep their order, see
# tests/cluster/conftest.py. There is one process more than processors, because many tests wait for Ray or a command.
PROCESSES := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(READY)
	@$(PYTEST) -m "not long and not slow and not gpu"

test-long: $(READY)
	@$(PYTEST) -m "long and not slow and not gpu"

test-all: test test-long

# What shows within minutes that a Python works: the package as it is installed, its API, and the page README.md.
smoke: $(READY)
	@$(BIN)/python -m pytest tests/test_minimal.py tests/test_package.py tests/test_api.py tests/test_architecture.py
	@$(BIN)/python -m pytest tests/test_docs.py -k README

# The smoke tests on every Python that is supported, each with an environment of its own. They lie in build/, since
# `make` empties .venv where an installation was interrupted. Others: make pythons PYTHONS="python3.10 python3.14"
PYTHONS ?= python3.10 python3.11 python3.12 python3.13

pythons:
	@for python in $(PYTHONS); do \
		echo "smoke tests on $$python"; \
		$(MAKE) --no-print-directory smoke PYTHON=$$python VENV=build/venvs/$${python##*/} || exit 1; \
	done

demo: $(READY)
	@$(BIN)/python -m fedfleet.tune.demo

# The documentation site, in site/. It is built without a network.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "open site/index.html"

slow: $(READY)
	@$(BIN)/python -m pytest -m slow

chaos: $(READY)
	@$(BIN)/python -m tests.faults.chaos

# On a machine with a CUDA device. A bare one, where this package is not installed, needs the packages that
# benchmarks/gpu.py names, and pytest and psutil for the tests: make gpu GPU_PYTHON=python3. The package is found in src/.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_OUT ?= build/gpu

gpu: export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu:
	@$(GPU_PYTHON) -m pytest -m gpu -rs -p no:cacheprovider -o addopts= tests/accelerators
	@$(GPU_PYTHON) benchmarks/gpu.py --workers 1,2,4 --goal all --out $(GPU_OUT)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	@rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# This file is written last. An environment without it is left from an interrupted installation and is made again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("PYTHON must be Python 3.10 or newer, got %d.%d; run make PYTHON=python3.x" % sys.version_info[:2])'
	@echo "bringing $(VENV) up to date, a few minutes the first time"
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	@rm -rf $@ *.egg-info src/*.egg-info
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
