#!/bin/bash
# make_venv.sh FOLDER: a virtual environment with pip, for the interpreter named by $PYTHON (python3). What is missing on
# the machine is said in one line, with the command that brings it.
set -euo pipefail
folder=$1
python=${PYTHON:-python3}

fail() {
    echo "treadle: $1" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "$python not found. Debian and Ubuntu: apt-get install python3 python3-venv python3-dev g++"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, $python is $("$python" -V). Name another one: make PYTHON=/path/to/python3.11"

missing=()
command -v g++ >/dev/null || missing+=(g++)
"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    missing+=(python3-dev)
"$python" -c 'import ensurepip, venv' 2>/dev/null || "$python" -m pip --version >/dev/null 2>&1 || missing+=(python3-venv)
((${#missing[@]} == 0)) || fail "please install what is missing and try again: apt-get install ${missing[*]}"

rm -rf "$folder"
if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$folder"
else # Debian's python3-pip without python3-venv
    "$python" -m venv --without-pip "$folder"
    "$python" -m pip install --quiet --prefix "$PWD/$folder" --ignore-installed pip
fi
