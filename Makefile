# Two commands matter to a newcomer: `make demo` and `make test`. Both create the environment when it is missing.

VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
UV     := uv==0.13.7
PYTHON ?= python3
# Bytecode is compiled while installing (others' packages) and kept (Shoal's own): where PYTHONDONTWRITEBYTECODE is set,
# as in many images, each of the thousand processes that the tests start would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE
# One thread a test process: the tests themselves use both cores.
export OMP_NUM_THREADS ?= 1
export MLFLOW_DISABLE_TELEMETRY := true
export DO_NOT_TRACK := 1

.PHONY: help setup demo test test-slow test-clusters test-gpu durations kubernetes fuzz lint format bench docs lock clean

help:
	@echo "make demo           train a small model with two processes, kill one, watch it recover (3 minutes)"
	@echo "make test           lint and all tests that need no cluster (about 20 minutes on 2 cores)"
	@echo "make test-slow      what takes minutes: drills, all meshes, a real 135M model (about 20 minutes)"
	@echo "make test-clusters  the tests against real services (an S3 server, an MLflow server, Slurm, Ray, Kubernetes)"
	@echo "make test-gpu       everything that wants a GPU; one card is enough (15 minutes; ONLY=matrix,drills for some of it)"
	@echo "make fuzz           every reader of outside data against generated input (CASES=100000 SEED=0 JOBS=1 READERS=…)"
	@echo "make durations      all of these; records how long each file takes, by which the next run is laid out"
	@echo "make kubernetes     what test-clusters needs of Kubernetes, built once into ~/.cache/shoal (15 minutes, 6 GB meanwhile)"
	@echo "make lint           ruff and mypy        make format    let ruff rewrite"
	@echo "make bench          every benchmark: a table and a ratio against a named peer"
	@echo "make docs           regenerate docs/reference from the code"
	@echo "make lock           resolve the dependencies anew into requirements.lock"

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Shoal needs Python 3.11 or newer: set PYTHON=/path/to/python3.11." >&2; exit 78; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		echo "Installing python3-venv, which Debian keeps apart from Python…" && apt-get update -qq && \
		apt-get install -y -qq python3-venv >/dev/null; } || \
		{ echo "This Python cannot create environments: install python3-venv, then try again." >&2; exit 78; }
	@echo "Setting up $(VENV) (minutes the first time, seconds afterwards)…"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check '$(UV)'
	@$(BIN)/uv pip install $$(test -t 2 || echo --quiet) --compile-bytecode --python $(BIN)/python --require-hashes -r requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $(READY)

demo: $(READY)
	@$(BIN)/python scripts/demo.py

# RECORD=1 writes how long each file took to tests/durations.json, by which the next run is laid out.
TESTS := $(BIN)/python scripts/tests.py $(if $(RECORD),--record)

# Lint is one of the tests (tests/test_lint.py), beside the others.
test: $(READY)
	$(TESTS) -m "not slow and not cluster" tests

test-slow: $(READY)
	$(TESTS) -m slow tests

# What cannot be built is skipped, or a failure where SHOAL_REQUIRE names it.
test-clusters: $(READY)
	-$(BIN)/python -m scripts.clusters.kubernetes
	$(TESTS) -m cluster tests

# Of several GPUs all are used; of one, ranks share it. OUT names a folder for the table and the logs.
test-gpu: $(READY)
	$(BIN)/python -m tests.gpu.suite $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT))

# The same cases for the same SEED; another one makes others. READERS names some of them (`python -m tests.fuzz list`).
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz $(READERS) --cases $(or $(CASES),100000) --seed $(or $(SEED),0) --jobs $(or $(JOBS),1)

# On a machine that does nothing else.
durations:
	$(MAKE) test test-slow test-clusters RECORD=1

kubernetes: $(READY)
	$(BIN)/python -m scripts.clusters.kubernetes

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/all.py

docs: $(READY)
	$(BIN)/python -m shoal.spec.reference docs/reference
	$(BIN)/python -m shoal.api_page docs/reference

lock: $(READY)
	@printf 'torch==2.13.0\n' > $(VENV)/constraints.txt
	$(BIN)/uv pip compile pyproject.toml --extra dev --constraint $(VENV)/constraints.txt --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-annotate --no-header --upgrade --quiet --output-file requirements.lock

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis demo-workspace
