# make chat | serve | test | slow | full | kernels | lint | setup | dev | docs | figures | soak | contracts | lock
# Knobs pass through: make serve MODEL=~/models/qwen SPEC=dflash2 PORT=8000

VENV := .venv
PYTHON_BIN := $(VENV)/bin/python
RUNTIME := $(VENV)/.runtime-ready
DEV := $(VENV)/.dev-ready
INPUTS := pyproject.toml tools/setup.sh requirements/runtime.txt

export VENV

# Test processes side by side, one thread each.
JOBS ?= 2
PYTEST = $(PYTHON_BIN) -m pytest -n $(JOBS) --dist loadscope

.PHONY: help chat serve test slow full kernels lint setup dev docs figures soak contracts lock

help:
	@echo "make chat    set up if needed, serve the bundled demo model, open a chat"
	@echo "make serve   set up if needed, serve MODEL (default: the bundled demo) on PORT (18020)"
	@echo "make test    set up if needed, run the default test suite"
	@echo "make slow    the tests that take minutes; make full: the sweeps that take hours"
	@echo "make kernels compiles every kernel for every card, sm_80 to sm_120; needs none"
	@echo "make lint    ruff and mypy"
	@echo "make setup   only create .venv with what serving needs; make dev adds what testing needs"
	@echo "make docs    write the pages that come from code and data"
	@echo "make figures take the demo's figures on this CPU again (15 to 20 minutes); make soak: half an hour more"
	@echo "make contracts  the sweeps that take hours, kept as data; goes on where it was stopped"
	@echo "make lock    resolve pyproject.toml into requirements/*.txt"

chat: $(RUNTIME)
	@$(VENV)/bin/soloist chat

serve: $(RUNTIME)
	@$(VENV)/bin/soloist serve

setup: $(RUNTIME)

dev: $(DEV)

test: $(DEV)
	$(PYTEST)

slow: $(DEV)
	$(PYTEST) -m slow

full: $(DEV)
	$(PYTEST) -m full

kernels: $(DEV)
	$(PYTEST) -m "not full" tests/ops/test_aot.py

lint: $(DEV)
	$(PYTHON_BIN) -m ruff check .
	$(PYTHON_BIN) -m ruff format --check .
	$(PYTHON_BIN) -m mypy

docs: $(DEV)
	$(PYTHON_BIN) tools/generate_docs.py

figures: $(DEV)
	$(PYTHON_BIN) tools/retake.py

soak: $(DEV)
	$(PYTHON_BIN) tools/retake.py --soak

RECORD = $(PYTHON_BIN) tools/record_tests.py --resume --out benchmarks/cpu
contracts: $(DEV)
	$(RECORD)/contracts.json -- -m "full or slow" -k "full or twenty or seed" tests/drafting/test_contracts_demo.py
	$(RECORD)/distribution.json -- -m full tests/drafting/test_law_in_the_loop.py tests/sampling/test_law_sampled.py
	$(RECORD)/cache.json -- -m full tests/cache

lock: $(DEV)
	$(PYTHON_BIN) tools/lock.py

$(RUNTIME): $(INPUTS)
	@tools/setup.sh runtime
	@touch $@

$(DEV): $(INPUTS) requirements/dev.txt
	@tools/setup.sh dev
	@touch $@ $(RUNTIME)
