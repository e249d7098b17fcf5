# `make test` and `make demo` set up .venv by themselves. Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test test-long test-all demo docs slow chaos gpu lint clean

# All tests of a file run in one process, so that its fixtures are made once. The files keep their order, see
# tests/cluster/conftest.py. There is one process more than processors, because many tests wait for Ray or a command.
PROCESSES := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(READY)
	@$(PYTEST) -m "not long and not slow and not gpu"

test-long: $(READY)
	@$(PYTEST) -m "long and not slow and not gpu"

test-all: test test-long

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
