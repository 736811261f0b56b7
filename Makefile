# The commands of this repository; each makes the environment that it needs (.venv, see scripts/bootstrap.py).
# PYTHON= chooses the interpreter. Paths are relative and quoted: a clone may lie under a folder with blanks.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help install demo test test-full checks test-megatron test-vllm test-compose images pytest lint types imports format up openapi

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
BIN := .venv/bin
SOURCES := core services tests benchmarks examples scripts

# Of `make demo`: DATA= a BEIR folder, QUERIES= held-out queries, MODEL= a Hugging Face folder or a hub id.
DATA ?=
QUERIES ?=
MODEL ?=
# Of `make pytest`, `make test-megatron`, `make test-vllm` and `make test-compose`: more arguments.
ARGS ?=
MEGATRON_ARGS ?= -q
VLLM_ARGS ?= -q
COMPOSE_ARGS ?= -q

help:
	@echo "make demo      train, serve and evaluate a small reranker on this machine"
	@echo "               (DATA=<BEIR folder> QUERIES=<n> MODEL=<folder or hub id> for other input)"
	@echo "make test      lint, types, import borders and the tests"
	@echo "make test-full      the same, and the combinations that make test leaves out"
	@echo "make test-megatron  the tests of the megatron backend alone (sets up .venv-megatron, 5 GB)"
	@echo "make test-vllm  the tests of the vllm engine alone (sets up .venv-vllm, 2 GB)"
	@echo "make test-compose  images and compose.yaml on a Docker engine (minutes; skipped where none answers)"
	@echo "make images    build the images of compose.yaml, with the commit in their labels"
	@echo "make up        run the whole stack in the foreground"
	@echo "make install   make .venv; PYTHON=<interpreter> chooses its Python"
	@echo "make lint types imports pytest format openapi bench-<name of a file in benchmarks/>"

install:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=<interpreter> ..." >&2; exit 2; }
	@"$(PYTHON)" scripts/bootstrap.py

demo: install
	@"$(BIN)/python" examples/demo.py $(if $(DATA),--data "$(DATA)") $(if $(QUERIES),--queries "$(QUERIES)") \
		$(if $(MODEL),--model "$(MODEL)")

# pytest last: some of its tests use the environments of the two before, and it says at the end what was skipped.
test: checks test-compose pytest

# A combination (marker `full`) is one more layout, strategy or kind of what another case of the same test shows.
test-full:
	@$(MAKE) --no-print-directory --keep-going test ARGS="$(ARGS) -m 'not compose'" \
		MEGATRON_ARGS="$(MEGATRON_ARGS) -m 'not compose'" VLLM_ARGS="$(VLLM_ARGS) -m 'not compose'"

# Two at a time: an environment is downloaded while the tests of another one run. What each prints comes when it ends.
checks:
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types imports test-megatron test-vllm

# Megatron under Python 3.12, in an environment of its own; skipped by name where there is no 3.12.
test-megatron:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=<interpreter> ..." >&2; exit 2; }
	@"$(PYTHON)" scripts/megatron_tests.py $(MEGATRON_ARGS)

# vLLM's build for the CPU under Python 3.11, in an environment of its own; skipped by name where it cannot be had.
test-vllm:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=<interpreter> ..." >&2; exit 2; }
	@"$(PYTHON)" scripts/vllm_tests.py $(VLLM_ARGS)

# The images from a fresh clone, and compose.yaml through kills and restarts; skipped by name where no engine answers.
test-compose: install
	@"$(BIN)/python" scripts/compose_tests.py $(COMPOSE_ARGS)

images:
	TEVATRON_COMMIT="$$(git rev-parse HEAD)" docker compose --profile demo build

pytest: install
	@"$(BIN)/python" scripts/test.py $(ARGS)

lint: install
	"$(BIN)/ruff" check $(SOURCES)
	"$(BIN)/ruff" format --check $(SOURCES)

types: install
	"$(BIN)/python" -m mypy core/src services/api/src services/trainer/src services/scorer/src services/evaluator/src

imports: install
	"$(BIN)/lint-imports"

format: install
	"$(BIN)/ruff" check --fix $(SOURCES)
	"$(BIN)/ruff" format $(SOURCES)

up: install
	@"$(BIN)/tevatron" up

openapi: install
	"$(BIN)/python" scripts/openapi.py docs/openapi.json

# make bench-demo runs benchmarks/demo.py, and so on.
bench-%: install
	"$(BIN)/python" "benchmarks/$*.py" $(ARGS)
