# make serve | test | check | venv | clean. Stamp files make a second run instant.

PYTHON ?= python3.11
ifeq (, $(shell command -v $(PYTHON) 2>/dev/null))
PYTHON := python3
endif
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
ARGS ?=

.PHONY: serve test check venv clean
.DEFAULT_GOAL := serve

serve: .venv/demo.stamp
	$(BIN)/diptych pd $(ARGS)

test: .venv/test.stamp
	scripts/test $(ARGS)

check: .venv/dev.stamp
	scripts/check

venv: .venv/dev.stamp

# -qq: pip's warnings about index pages that a machine does not have are noise; errors still reach the terminal.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing pinned dependencies into .venv (once; takes a few minutes)"
	$(PIP) -e '.[demo]'
	@touch $@

.venv/test.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what the tests need into .venv (once; takes a few minutes)"
	$(PIP) -e '.[test]'
	@touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing development tools into .venv (once; takes a few minutes)"
	$(PIP) -e '.[dev]'
	@touch $@ .venv/test.stamp .venv/demo.stamp

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
