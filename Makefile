# Every target sets itself up: a virtual environment in .venv, pinned dependencies, the compiled libraries. Needs
# python3 >= 3.10, for the CPU library a C++17 compiler, for the CUDA library also nvcc of CUDA 12.8 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
SOURCES := setup.py $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h')
PYTEST_ARGS ?=

.PHONY: help setup demo loco test bench sanitize lint wheel clean

help:
	@echo "make demo      an RL run whose rollout workers follow the trainer by patches (about 2 minutes)"
	@echo "make loco      PULSELoCo beside DiLoCo and DDP (10 to 15 minutes); writes docs/loco, docs/pulseloco.md"
	@echo "make test      the test suite"
	@echo "make bench     benchmarks beside eager PyTorch; writes docs/performance.md"
	@echo "make sanitize  csrc, CUDA kernel bodies too, under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make lint      ruff and mypy"
	@echo "make wheel     a wheel in dist/, with the CUDA library where nvcc is; PULSE_CUDA=1 demands it"

setup: $(VENV)/.built

# torch first: a build that asks for it in isolation would fetch another one, of several GB.
$(VENV)/.packages: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy setuptools wheel
	touch $@

$(VENV)/.built: $(VENV)/.packages $(SOURCES)
	$(PIP) --no-build-isolation --editable '.[cli,demo,bench,test,dev]'
	touch $@

demo: setup
	$(BIN)/pulse-kernels demo --out build/demo

loco: setup
	$(BIN)/python -m examples.loco --doc docs/pulseloco.md

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: setup
	mkdir -p build
	$(BIN)/python -m pytest bench --benchmark-quiet --benchmark-json=build/bench.json
	$(BIN)/python -m bench.report build/bench.json

sanitize: setup
	$(BIN)/python tests/csrc/run.py asan asan-simde

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: setup
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info pulse_kernels/*.so .benchmarks $(VENV)
