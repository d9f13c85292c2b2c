# Everything runs in .venv, which is made again only when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
STAMP := $(VENV)/.installed
ARGS ?=
SEED ?= fixed
PART ?= 1/1
TORCH ?=
BUILDER ?= html

unexport PYTHONDONTWRITEBYTECODE  # modules are compiled when they are first imported, not when they are installed

.PHONY: train test nightly check lint docs bench gpu torch-nightly clean

train: $(BASE)
	$(BIN)/python -m experiments.train_dqn $(ARGS)

test: $(STAMP)
	@begin=$$(date +%s); $(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly" $(ARGS); status=$$?; \
	echo "make test: $$(($$(date +%s) - begin)) s of the 360 that it may take on two quiet cores"; exit $$status

# What takes long: networks, commands, committed figures, Inductor, more cases of each property. SEED=random draws new ones.
# PART=2/3 runs the second third of these tests; the parts have no test in common.
nightly: $(STAMP)
	SEED=$(SEED) $(BIN)/python -m pytest -n 2 --dist worksteal --part $(PART) -m "nightly or hypothesis" --hypothesis-profile=long $(ARGS)
	@$(BIN)/python -m tests.bounds & \
	$(BIN)/python -m tests.random_cases 20000 $(if $(filter random,$(SEED)),--seed random); cases=$$?; \
	wait $$! && exit $$cases

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test nightly

# The pages as a site in runs/site/html, without warnings; BUILDER=linkcheck asks for every link to another site.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b $(BUILDER) -c docs . runs/site/$(BUILDER)

bench: $(STAMP)
	@$(BIN)/python -m experiments.benchmark suite=speed $(ARGS)

# Fifteen minutes on a GPU: two commands, STEP=1 and STEP=2, each under eight minutes; ARGS=backend=host rehearses them.
# With five minutes: ARGS=short. ARGS=plans makes the plan files again, without a GPU.
# Where there is a .venv, it is used; a GPU machine has its own Python.
gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m experiments.validate_gpu.probe \
		$(if $(STEP),step=$(STEP)) $(ARGS)

$(BASE): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable .
	touch $(BASE)

# TORCH=2.11 installs that version; it has an effect when the environment is made.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]' $(if $(TORCH),'torch==$(TORCH).*')
	touch $(BASE) $(STAMP)

# Replaces PyTorch by a nightly build, whose version pyproject.toml does not admit yet, from the index TORCH_INDEX.
torch-nightly: $(STAMP)
	$(BIN)/python -m pip install --quiet --upgrade --pre --index-url '$(TORCH_INDEX)' torch

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
