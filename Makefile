# make chat | serve | test | lint | setup | dev | docs | lock
# Knobs pass through: make serve MODEL=~/models/qwen SPEC=dflash2 PORT=8000

VENV := .venv
PYTHON_BIN := $(VENV)/bin/python
RUNTIME := $(VENV)/.runtime-ready
DEV := $(VENV)/.dev-ready
INPUTS := pyproject.toml tools/setup.sh requirements/runtime.txt

export VENV

.PHONY: help chat serve test slow lint setup dev docs lock

help:
	@echo "make chat    set up if needed, serve the bundled demo model, open a chat"
	@echo "make serve   set up if needed, serve MODEL (default: the bundled demo) on PORT (18020)"
	@echo "make test    set up if needed, run the default test suite"
	@echo "make slow    the tests that take minutes"
	@echo "make lint    ruff and mypy"
	@echo "make setup   only create .venv with what serving needs; make dev adds what testing needs"
	@echo "make docs    regenerate docs/knobs.md and docs/commands.md"
	@echo "make lock    resolve pyproject.toml into requirements/*.txt"

chat: $(RUNTIME)
	@$(VENV)/bin/soloist chat

serve: $(RUNTIME)
	@$(VENV)/bin/soloist serve

setup: $(RUNTIME)

dev: $(DEV)

test: $(DEV)
	$(PYTHON_BIN) -m pytest

slow: $(DEV)
	$(PYTHON_BIN) -m pytest -m slow

lint: $(DEV)
	$(PYTHON_BIN) -m ruff check .
	$(PYTHON_BIN) -m ruff format --check .
	$(PYTHON_BIN) -m mypy

docs: $(DEV)
	$(PYTHON_BIN) tools/generate_docs.py

lock: $(DEV)
	$(PYTHON_BIN) tools/lock.py

$(RUNTIME): $(INPUTS)
	@tools/setup.sh runtime
	@touch $@

$(DEV): $(INPUTS) requirements/dev.txt
	@tools/setup.sh dev
	@touch $@ $(RUNTIME)
