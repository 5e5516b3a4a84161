# debubble: `make run` shows the main job, `make test` runs the tests.  Both set up .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
TORCH ?= torch==2.13.0

# Tests start many processes, each of which would otherwise compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

# Modules are compiled when they are first imported: most of torch's never are.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile "$(TORCH)"
	$(BIN)/pip install --quiet --no-compile --editable ".[torch,hf,dev]"
	touch $@

setup: $(VENV)/.ready ## create .venv with debubble, torch and the development tools

run: $(VENV)/.ready ## plan a small Llama for 4 processes, train it, compare plan and measurement
	$(BIN)/python -m debubble.training.demo $(ARGS)

test: $(VENV)/.ready ## run the tests (minutes)
	$(BIN)/pytest -n auto --dist worksteal $(ARGS)

test-slow: $(VENV)/.ready ## run the slow extras (hours), or ARGS=tests/FOLDER of them
	$(BIN)/pytest -m slow --timeout 1200 $(ARGS)

test-cuda: $(VENV)/.ready ## run the tests that need a GPU
	$(BIN)/pytest tests/cuda -m cuda

$(FRAMEWORKS)/.ready:
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet "$(TORCH)"
	$(FRAMEWORKS)/bin/pip install --quiet triton megatron-core==0.16.1 torchtitan==0.3.0 deepspeed==0.19.8 nemo-automodel==0.7.0
	$(FRAMEWORKS)/bin/pip install --quiet --editable ".[torch,hf,dev]"
	touch $@

test-frameworks: $(FRAMEWORKS)/.ready ## run the other frameworks' own code on the exports, in a venv of its own
	$(FRAMEWORKS)/bin/pytest tests/exports/test_frameworks.py -rs --timeout 1200
	$(FRAMEWORKS)/bin/pytest tests/training/test_examples.py -rs --timeout 1200 -m slow -k torchtitan

golden: $(VENV)/.ready ## hold this version's plans to the golden corpus (ARGS=--exact: a move changes nothing)
	cd benchmarks && $(abspath $(BIN))/python -m golden $(ARGS)

check: $(VENV)/.ready ## ruff, mypy, the contracts of the imports, words of names
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	MYPY_NUM_WORKERS=auto $(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_words.py

$(VENV)/.docs-ready: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable ".[docs]"
	touch $@

docs: $(VENV)/.docs-ready ## build the documentation in build/docs; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	$(BIN)/python docs/check_search.py build/docs

man: $(VENV)/.ready ## write the manual pages of all commands to build/man (`man -l build/man/debubble-plan.1`)
	$(BIN)/python tools/write_man_pages.py build/man

docs-links: $(VENV)/.docs-ready ## ask every page that the documentation links to elsewhere
	$(BIN)/python -m sphinx -q -b linkcheck docs build/links

docs-check: $(VENV)/.ready ## run the commands of README and docs (many minutes)
	$(BIN)/python docs/run_commands.py

clean: ## remove what was built
	rm -rf $(VENV) build dist runs

.PHONY: help setup run test test-slow test-cuda test-frameworks golden check docs man docs-links docs-check clean
