# Every target does its own set-up: a machine needs only Python 3.11 to 3.13, pip and make.

PYTHON ?= python3
UV_VERSION := 0.13.8
UV := .tools/bin/uv
SYNC := .venv/.synced
BIN := .venv/bin
SOURCES := packages integration tools
TYPED := $(wildcard packages/*/src) integration/src integration/matrix tools

# Each process of a run imports torch, vLLM or both: from bytecode that takes seconds, from source half a minute.
export PYTHONDONTWRITEBYTECODE :=
export UV_PROJECT_ENVIRONMENT := .venv

.PHONY: help setup demo test test-waiting test-computing check matrix format clean

help:
	@echo "make demo    train the demo model with GRPO on this machine's CPU (real vLLM, Megatron-Core and Ray)"
	@echo "make test    everything that CI runs: lint, types, import rules, tests, coverage"
	@echo "make check   the static part of make test"
	@echo "make matrix  every combination of versions and pipelines that this machine can run; hours"
	@echo "make format  apply the formatter and the safe lint fixes"

setup: $(SYNC)

# uv lives inside the checkout, at one version, so that the resolver is part of what is pinned.
$(UV):
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action ignore --upgrade --target .tools uv==$(UV_VERSION)

$(SYNC): $(UV) pyproject.toml $(wildcard packages/*/pyproject.toml) integration/pyproject.toml
	$(UV) sync --quiet --compile-bytecode --python $(PYTHON)
	@touch $@

demo: $(SYNC)
	$(BIN)/vime-grpo train integration/examples/demo_cpu.toml

check: $(SYNC)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	MYPYPATH=integration/matrix $(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports --no-logo
	$(BIN)/hadolint $(wildcard docker/Dockerfile.*)
	$(BIN)/shellcheck $(wildcard tools/*.sh tools/*/*.sh docker/*.sh)
	$(BIN)/zizmor --offline --quiet .github/workflows

test: check
	$(BIN)/coverage erase
	$(MAKE) --no-print-directory --jobs=2 test-waiting test-computing
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Side by side: the first waits for processes most of its time, and the second computes.
test-waiting:
	$(BIN)/coverage run -m pytest -p no:cacheprovider integration/tests packages/vime-sync packages/vime-rollout

test-computing:
	$(BIN)/coverage run -m pytest -p no:cacheprovider packages/vime-megatron packages/vime-grpo packages/vime-devices tools/tests

matrix: $(SYNC)
	$(BIN)/python integration/matrix/cli.py run

format: $(SYNC)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf .venv .tools uv.lock runs dist
