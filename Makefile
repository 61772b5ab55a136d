# `make train` and `make test` are all a newcomer needs: each sets up .venv on its first call and installs nothing on
# the next. The set-up runs again only when pyproject.toml or constraints.txt has changed.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
# The first Python of the supported versions that really starts; `make PYTHON=...` chooses another.
PYTHON = $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# One thread per rank: several ranks share the cores of one machine.
export OMP_NUM_THREADS ?= 1
# `make train NPROC=8 DOMAIN="2 2" ARGS="--epochs 50"`: how many ranks, how many of them share one field, and anything
# else that `shardfield train` takes.
NPROC ?= 4
JOBS ?= 2
DOMAIN ?= 2
TORCHRUN := $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node

.PHONY: train weather aero test sweep fuzz curves figures tutorial-times bench performance lint format types pytest docs test-integrations test-launchers test-models test-torch test-release setup clean

train: setup
	$(TORCHRUN) $(NPROC) -m shardfield train --domain $(DOMAIN) $(ARGS)

# Trains a spherical model to forecast shallow water, forecasts ten days with it, and plots globes and skill:
# runs/swe_sfno/forecast.png. Some minutes on two cores.
weather: setup
	$(TORCHRUN) $(NPROC) -m shardfield train swe_sfno --domain 2 2 $(ARGS)
	$(TORCHRUN) $(NPROC) -m shardfield predict runs/swe_sfno --domain 2 2 --steps 40 --cases 4 \
		--out runs/swe_sfno/forecast.zarr --picture runs/swe_sfno/forecast.png

# A Transolver learns the pressure on bodies in a stream; the points of each body are sharded over the ranks.
aero: setup
	$(TORCHRUN) $(NPROC) -m shardfield train aero_transolver --domain $(NPROC) $(ARGS)

test: lint types pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

# Two tests at a time, half of them each (who is done first takes some of the other's): while one starts processes or
# waits for them, the other computes. Ranks of many tests import the two packages, so they come with them.
pytest: setup
	SHARDFIELD_PRELOAD="neuralop torch_geometric.nn" $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

# Installs mpirun and a one-node SLURM where they are missing, so it is no part of `make test`.
test-launchers: setup
	$(BIN)/python -m pytest tests/launchers

# Installs the wheel with the extra "recipes" in an environment of its own and trains there, outside the repository.
test-release: setup
	$(BIN)/python -m pytest tests/release

# The pages about other people's training loops, and the loggers, with the packages themselves.
test-integrations: $(VENV)/.integrations
	$(BIN)/python -m pytest tests/test_docs.py -k "lightning or accelerate"
	$(BIN)/python -m pytest tests/train/test_loggers.py

# The tests on another release of torch, `make test-torch TORCH=2.15.0`: its default build in an environment of its own,
# which also sees the packages of the usual one. (torch-harmonics is built for one release: tests/ops/spectral/test_torch_harmonics.py may fail.)
test-torch: setup
	$(BIN)/python -m venv $(VENV)/torch-$(TORCH)
	$(VENV)/torch-$(TORCH)/bin/python -m pip install -qq --disable-pip-version-check torch==$(TORCH)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> $$($(VENV)/torch-$(TORCH)/bin/python -c 'import site; print(site.getsitepackages()[0])')/packages.pth
	PYTHONPATH=src SHARDFIELD_PRELOAD="neuralop torch_geometric.nn" $(VENV)/torch-$(TORCH)/bin/python -m pytest \
		--numprocesses $(JOBS) --dist worksteal $(ARGS)

# Other people's models, unmodified; writes docs/models.md.
test-models: $(VENV)/.zoo
	rm -f .models.jsonl
	SHARDFIELD_MODELS=.models.jsonl $(BIN)/python -m pytest tests/zoo
	$(BIN)/python -m tests.zoo.page .models.jsonl docs/models.md

# Every layout of the case table, every row in bf16 and under autocast, PyTorch's whole operator database, and 2,000
# random programs: takes a while, writes docs/op-coverage.md, and fails where its numbers fall.
sweep: setup
	SHARDFIELD_LAYOUTS=1000 $(BIN)/python -m pytest tests/ops/test_case_tables.py tests/ops/test_low_precision.py \
		tests/ops/test_second_derivatives.py tests/ops/test_inference_mode.py tests/compiler/test_compile.py \
		tests/planning/test_bars.py
	$(BIN)/python -m tests.ops.opinfo_sweep --page docs/op-coverage.md
	$(BIN)/python -m tests.fuzz $(FUZZ)

# Random programs against one device, `make fuzz FUZZ="--programs 500 --seed 7000"`; a failure is shrunk and printed.
fuzz: setup
	$(BIN)/python -m tests.fuzz $(FUZZ)

# 300 steps of three models on 1, 2, 4 and 2 x 2 ranks under each strategy, against plain torch: writes docs/curves.json
# and draws them. Curves that the file has are not run again, `make curves CURVES=--again` runs all of them.
curves: setup
	$(BIN)/python -m tests.train.curves $(CURVES)
	$(BIN)/python -m docs._figures

# Draws the pictures of README and docs again: docs/figures, by the scripts in docs/_figures.
figures: setup
	$(BIN)/python -m docs._figures

# Measures the operations of the tutorials on 1, 2 and 4 ranks: docs/tutorials.json.
tutorial-times: setup
	$(BIN)/python -m docs._figures.measure_tutorials $(NAMES)
	$(BIN)/python -m docs._figures

# `make bench NAMES="halo fft" ARGS=--quick`; writes into benchmarks/results, of which `make performance` makes the page.
bench: setup
	$(BIN)/python -m shardfield bench $(NAMES) --out benchmarks/results $(ARGS)

performance: setup
	$(BIN)/python -m shardfield bench --page docs/performance.md --out benchmarks/results

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

setup: $(VENV)/.dev $(VENV)/.native

# Functions in C++, where there is a compiler; everything works without them.
$(VENV)/.native: src/shardfield/native/leaves.cpp $(VENV)/.dev
	@$(BIN)/python -m shardfield build --if-possible
	@touch $@

# torch goes first and alone, so that no other package's range decides which build is taken. The two packages without
# their dependencies: one pulls in hundreds of megabytes that its models never import (what they import is in the extra
# "recipe-imports"), the other asks for one torch release and runs on those we support.
$(VENV)/.dev: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { \
		test -n "$(PYTHON)" || { echo "shardfield needs Python 3.11 or newer with venv; set PYTHON=..." >&2; exit 1; }; \
		echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing shardfield and its development tools into $(VENV)"
	@$(PIP) torch
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[dev,recipe-imports,meshes,models]'
	@$(PIP) --no-deps neuraloperator torch-harmonics
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@echo "installing the documentation tools into $(VENV)"
	@$(PIP) --no-build-isolation --editable '.[dev,recipe-imports,meshes,models,docs]'
	@touch $@

$(VENV)/.zoo: $(VENV)/.dev
	@echo "installing the models into $(VENV)"
	@$(PIP) --no-build-isolation --editable '.[dev,recipe-imports,meshes,models,zoo]'
	@$(PIP) --no-deps timm vit-pytorch microsoft-aurora miles-credit the-well nvidia-physicsnemo \
		anemoi-models anemoi-graphs anemoi-utils
	@touch $@

$(VENV)/.integrations: $(VENV)/.dev
	@echo "installing training loops and loggers into $(VENV)"
	@$(PIP) --no-build-isolation --editable '.[dev,recipe-imports,meshes,models,integrations]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check wandb mlflow-skinny
	@touch $@

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
