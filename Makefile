# Everything runs in .venv. The stamp files there say what is installed; editing pyproject.toml outdates them.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
INSTALLED_TEST := .venv/installed-test

.PHONY: demo model test notebooks lint types clean

demo: $(INSTALLED)
	$(BIN)/python decode/demo.py

model: $(INSTALLED)
	$(BIN)/python -c "import sys; from eagle_jax.embedded import main; sys.exit(main([]))"

# A process for each core; the tests of one file, which share models and programs, stay in one of them.
test: $(INSTALLED_TEST)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

notebooks: $(INSTALLED_TEST)
	FAST=1 $(BIN)/python -m pytest --nbmake --nbmake-timeout 900 notebooks

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED_TEST)
	$(BIN)/pyright

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Not the interpreter: `venv` makes that first and pip last, so that pip stands for a whole environment.
$(BIN)/pip:
	$(PYTHON) -m venv .venv

$(INSTALLED): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install -e .
	touch $@

$(INSTALLED_TEST): pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install -e ".[test]"
	touch $(INSTALLED) $@
