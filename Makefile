# make demo   a fine-tuning from start to end, twice: the second run is served from the cache
# make test   the test suite
# make cards  docs/models: every family against transformers at every layout, some minutes
# All set up everything they need. `make PYTHON=/path/to/python3.12 …` names an interpreter.

SHELL := /bin/sh
BIN := .venv/bin
DEMO := .mcaflow/demo
# Bytecode that is not kept costs every process 10 s of compilation at import.
unexport PYTHONDONTWRITEBYTECODE
# Waiting OpenMP threads otherwise spin, which slows several processes on the same cores down by a factor of 3.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test cards lint format bench setup smollm2 clean

setup:
	@PYTHON="$(PYTHON)" scripts/setup.sh dev

demo: setup
	@$(BIN)/python -m mca_lib.demo_assets $(DEMO)
	@$(BIN)/mcaflow run deployments/recipes/demo.yaml
	@echo
	@echo "The same recipe once more: every stage comes from the store."
	@$(BIN)/mcaflow run deployments/recipes/demo.yaml

test: setup
	@sh scripts/test.sh $(BIN)/python

cards: setup
	@PYTHONWARNINGS=ignore $(BIN)/python -m mca_lib.verification docs/models

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m pytest tests/benchmarks -s

smollm2:
	@PYTHON="$(PYTHON)" scripts/setup.sh dev smollm2
	@$(BIN)/python -m deployments.smollm2 smollm2-hf

clean:
	rm -rf .mcaflow .pytest_cache .ruff_cache
