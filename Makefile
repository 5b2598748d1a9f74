# `make run`: the demo. `make test`: ruff and the whole suite. `make check`: ruff and the tests that neither start Python nor
# train many runs, in less than a minute. `make gpu`: what a GPU does, in ten minutes at most; without one it says so.
# PYTHON may be any 3.10 to 3.12.
PYTHON ?= python3
VENV := .venv

.PHONY: run test check gpu

run: $(VENV)/.run
	$(VENV)/bin/python run.py

test: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest

check: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest -m "not programs and not long" -n auto

gpu: $(VENV)/.test
	$(VENV)/bin/python benchmarks/performance/gpu.py

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12) and "Python 3.10, 3.11 or 3.12 is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: requirements.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -q -r requirements.txt
	touch $@

$(VENV)/.test: requirements.txt requirements-optional.txt requirements-dev.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -q -r requirements-dev.txt
	touch $@
