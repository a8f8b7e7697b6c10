# Everything runs in .venv. The stamp files there say what is installed; editing pyproject.toml outdates them.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
INSTALLED_TEST := .venv/installed-test

.PHONY: demo test lint types clean

demo: $(INSTALLED)
	$(BIN)/python -m eagle_jax.embedded
	$(BIN)/python decode/demo.py

test: $(INSTALLED_TEST)
	$(BIN)/python -m pytest

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED_TEST)
	$(BIN)/pyright

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip last of all: an interrupted `venv` leaves an interpreter without it.
$(BIN)/pip:
	$(PYTHON) -m venv .venv

$(INSTALLED): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install -e .
	touch $@

$(INSTALLED_TEST): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install -e ".[test]"
	touch $(INSTALLED) $@
