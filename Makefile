# `make demo` and `make test` do all their own set-up: a virtual environment in .venv and everything in constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-slow lint clean

demo: $(READY)            ## small GLM-4.5V: convert, train on several topologies, resume, resplit, export; prints the proof
	$(BIN)/python -m examples.quickstart.demo --work .demo

PYTEST := $(BIN)/python -m pytest -p no:warnings -n 2 --dist worksteal

test: $(READY)            ## the suite
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(READY)       ## its long tail: kills, launch scripts, memory
	$(PYTEST) -m slow $(PYTEST_ARGS)

lint: $(READY)            ## ruff and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) .demo

$(READY): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,dev]"
	touch $(READY)
