# make run     set everything up, start the server on the built-in model and show a first answer
# make test    set everything up and pass the tests
# make lint    ruff, mypy, import-linter, clang-format, tables against the results they come from
# make bench   measure this machine against the limits of its hardware
# make format  put Python and C++ into shape
# make build   only the native module, into the source tree
# make lock    resolve requirements/*.in again
#
# All of it happens in .venv and build/; both can be deleted at any time.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
NODE_CLIENTS := tests/clients/node_modules/.package-lock.json
CPP = $(shell find csrc -name '*.cpp' -o -name '*.h')
JOBS ?= $(shell nproc)
CALLERS_PATH := $(PATH)
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test lint format bench build lock
.DELETE_ON_ERROR:

run: build
	@PATH="$(CALLERS_PATH)" $(VENV)/bin/treadle serve --first-answer  # the hints are for the caller's shell

test: build $(VENV)/installed-dev $(NODE_CLIENTS)
	pytest

lint: build $(VENV)/installed-dev
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-cache
	clang-format --dry-run --Werror $(CPP)
	python -m benchmarks.tables --check

format: $(VENV)/installed-dev
	ruff check --fix-only .
	ruff format .
	clang-format -i $(CPP)

bench: build
	treadle bench machine
	treadle bench offline

build: $(VENV)/installed build/build.ninja
	@cmake --build build -j$(JOBS)

$(VENV)/bin/python:
	PYTHON=$(PYTHON) tools/make_venv.sh $(VENV)

# What Treadle needs to run and to be built, and `treadle` itself: the package stays in the source tree, with the
# module that `make build` puts there.
$(VENV)/installed: $(VENV)/bin/python requirements/run.txt requirements/build.txt pyproject.toml
	pip install --quiet --require-hashes -r requirements/run.txt -r requirements/build.txt
	pip install --quiet --no-build-isolation --no-deps --config-settings=wheel.cmake=false --config-settings=editable.mode=inplace -e .
	@touch $@

build/build.ninja: CMakeLists.txt $(VENV)/installed
	cmake -S . -B build -G Ninja -DPython_EXECUTABLE=$(BIN)/python -DTREADLE_IN_PLACE=ON
	@touch $@

$(VENV)/installed-dev: requirements/dev.txt requirements/torch.in | $(VENV)/installed
	pip install --quiet --require-hashes -r requirements/dev.txt
	pip install --quiet -r requirements/torch.in
	@touch $@

# API clients that run in Node.js, for the tests.
$(NODE_CLIENTS): tests/clients/package-lock.json
	npm --prefix tests/clients ci --silent
	@touch $@

# Arguments for pip-compile: make lock LOCK="--upgrade-package numpy"
lock: $(VENV)/installed-dev
	tools/lock.sh $(LOCK)
