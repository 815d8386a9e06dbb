# Two commands on a bare machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The stamp is newer than what it was made from, or the install runs again. Nothing else triggers it.
STAMP := $(VENV)/.installed
# Which third of the long tests `make test` runs: the commit decides, or whoever sets 0, 1 or 2.
SHARDWISE_TURN ?= $(shell git rev-parse --quiet --verify HEAD 2>/dev/null || echo 0)
# Every process that a test starts would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo install test soak check format bench accuracy gpu docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    install, train the reference decoder for about a minute, say where the results are"
	@echo "make test    install, run the tests that run at every change; of the long ones a third ([SHARDWISE_TURN=0])"
	@echo "make check   format, lint, types, the shape of the package"
	@echo "make bench   step time and start-up beside plain torch, pipelines beside their simulation, checkpoints beside torch's, training beside faults; rewrites docs/benchmarks.md, docs/pipeline.md, docs/checkpoints.md, docs/recovery.md"
	@echo "make accuracy [ROWS=file.csv] [OUT=accuracy.json]   the planner against published measurements"
	@echo "make gpu     the checks that need a CUDA device"
	@echo "make soak    every test, those that take too long for every change included, with more draws"
	@echo "make docs    rewrite docs/reference.md, docs/compatibility.md, docs/constraints.md and the plan that README.md shows"
	@echo "make install, make format   set up .venv; format and mend what ruff can"
	@echo "make clean   remove caches and .venv (runs/ stays)"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}. Use make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/shardwise train

test: $(STAMP)
	SHARDWISE_TURN=$(SHARDWISE_TURN) $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=25 tests

soak: $(STAMP)
	SHARDWISE_SOAK=200 $(BIN)/python -m pytest -q tests

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/pure/test_shape.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/pipeline.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/goodput.py

# Numbers to OUT, the page to docs/planner-accuracy.md
ROWS ?= ../shared/reference/published_train.csv
OUT ?= accuracy.json
accuracy: $(STAMP)
	$(BIN)/python tools/accuracy.py $(ROWS) --out $(OUT)

gpu: $(STAMP)
	$(BIN)/python tools/gpu.py

docs: $(STAMP)
	$(BIN)/python tools/reference.py
	PYTHONPATH=. $(BIN)/python tools/compatibility.py
	$(BIN)/python -m shardwise.plan.constraints > docs/constraints.md
	$(BIN)/python tools/images.py plan

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +
