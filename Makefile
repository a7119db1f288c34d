# `make` lists the targets. Each one makes its own set-up in .venv; a second run finds it done.

PYTHON ?= python3
BIN := .venv/bin
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo test test-core test-oldest lint bench-quick crash retention-sim clean setup-core setup-sglang

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: setup-sglang ## real SGLang: a long prompt, kill -9, a restart, and the prompt's cache is back
	@$(BIN)/python tools/demo.py

test: setup-sglang ## the whole suite, with real SGLang servers
	$(BIN)/python -m pytest $(ARGS)

test-core: setup-core ## the tests that need no SGLang
	$(BIN)/python -m pytest --ignore=tests/sglang --ignore=tests/integration $(ARGS)

test-oldest: setup-core ## the same with the oldest libraries that pyproject.toml allows
	@$(PYTHON) -m venv build/oldest
	@build/oldest/bin/pip install -q $$($(BIN)/python requirements/oldest.py) -e . \
	    pytest pytest-timeout hypothesis
	build/oldest/bin/python -m pytest --ignore=tests/sglang --ignore=tests/integration $(ARGS)

lint: setup-core ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy does not know setuptools' package-dir: show it the tree as it is imported.
	@rm -rf build/tree && mkdir -p build/tree/kvtier && ln -s $(CURDIR)/kvtier/* build/tree/kvtier/
	@ln -s $(CURDIR)/backends $(CURDIR)/integration build/tree/kvtier/
	cd build/tree && MYPYPATH=. $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p kvtier

bench-quick: setup-sglang ## write, read and lookup speed against SGLang's file backend
	@$(BIN)/python tools/bench_quick.py $(ARGS)

crash: setup-sglang ## as root: power cuts, torn writes, kills, rot, bad drives; the long form, 45 minutes
	@cd tools && ../$(BIN)/python -m powercut --form long --output ../build/powercut.json $(ARGS)

retention-sim: setup-core ## agent traffic over full stores: kvtier beside page and segment LRU; minutes
	@cd tools && ../$(BIN)/python -m retention_sim $(ARGS)

clean: ## remove .venv and what tools left behind
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

setup-core:
	@tools/setup.sh core

setup-sglang:
	@tools/setup.sh sglang
