# Everything runs in .venv, which is made again only when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
SEED ?= fixed

unexport PYTHONDONTWRITEBYTECODE  # modules are compiled when they are first imported, not when they are installed

.PHONY: train test nightly check lint bench gpu clean

train: $(STAMP)
	$(BIN)/python -m experiments.train_dqn $(ARGS)

test: $(STAMP)
	@begin=$$(date +%s); $(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly" $(ARGS); status=$$?; \
	echo "make test: $$(($$(date +%s) - begin)) s of the 360 that it may take on two quiet cores"; exit $$status

# What takes long: networks, commands, committed figures, Inductor, more cases of each property. SEED=random draws new ones.
nightly: $(STAMP)
	SEED=$(SEED) $(BIN)/python -m pytest -n 2 --dist worksteal -m "nightly or hypothesis" --hypothesis-profile=long $(ARGS)
	@$(BIN)/python -m tests.bounds & \
	$(BIN)/python -m tests.random_cases 50000 $(if $(filter random,$(SEED)),--seed random); cases=$$?; \
	wait $$! && exit $$cases

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test nightly

bench: $(STAMP)
	@$(BIN)/python -m experiments.benchmark suite=speed $(ARGS)

# Fifteen minutes on a GPU: two commands, STEP=1 and STEP=2, each under eight minutes; ARGS=backend=host rehearses them.
# With five minutes: ARGS=short. ARGS=plans makes the plan files again, without a GPU.
# Where there is a .venv, it is used; a GPU machine has its own Python.
gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m experiments.validate_gpu.probe \
		$(if $(STEP),step=$(STEP)) $(ARGS)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
