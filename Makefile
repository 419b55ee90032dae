# Each target works in a fresh clone: the first one sets up .venv, which takes a few minutes (torch is large).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean

demo: .venv/installed
	$(BIN)/fxckpt demo

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python -m benchmarks.run planning
	$(BIN)/python -m benchmarks.run overhead
	$(BIN)/python -m benchmarks.run pareto
	$(BIN)/python -m benchmarks.run tables

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -e '.[dev,models]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
