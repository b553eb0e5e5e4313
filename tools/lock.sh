#!/bin/bash
# Resolves pyproject.toml and requirements/*.in into requirements/*.txt: exact versions with hashes, and no trace of
# where they were found.
set -euo pipefail
cd "$(dirname "$0")/.."
export CUSTOM_COMPILE_COMMAND="make lock"
options=(--quiet --generate-hashes --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options)
pip-compile "${options[@]}" "$@" --output-file=requirements/run.txt pyproject.toml
pip-compile "${options[@]}" "$@" --output-file=requirements/build.txt requirements/build.in
pip-compile "${options[@]}" "$@" --output-file=requirements/dev.txt requirements/dev.in
