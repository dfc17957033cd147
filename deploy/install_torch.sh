#!/bin/sh
# install_torch.sh cpu|cuda: installs torch alone, in the version of requirements.lock, unless PyPI's build is the right one.
# TORCH_INDEX names the index to take it from. Without it, `cpu` takes a wheel that pip finds without an index, or else PyTorch's own
# index of builds for CPU. If that does not answer, and for `cuda`, torch comes from PyPI with everything else.
# PIP is the pip to use, QUIET its -q.
set -eu
here=$(dirname "$0")
pip=${PIP:-pip}
torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$here/requirements.lock")
cpu_index=https://download.pytorch.org/whl/cpu

run_pip() { "$pip" --disable-pip-version-check install ${QUIET:-} --no-deps "$@" "$torch"; }

at_hand() { run_pip --no-index 2>/dev/null; }

answers() { # checks the pages that pip could not fetch: folders and other indexes that pip knows may have a torch, too
    place=${1#*://}
    place=${place#*@} # pip hides passwords
    said=$("$pip" --disable-pip-version-check -vv --retries 0 --timeout 5 index versions --index-url "$1" torch 2>&1) || return 1
    ! printf '%s\n' "$said" | grep "Could not fetch URL" | grep -qF "${place%/}/"
}

if [ -n "${TORCH_INDEX:-}" ]; then
    answers "$TORCH_INDEX" || { echo "TORCH_INDEX: $TORCH_INDEX does not answer, or has no torch for this Python" >&2; exit 1; }
    run_pip --index-url "$TORCH_INDEX"
elif [ "$1" = cpu ] && ! at_hand; then
    echo "torch is the build for CPU, from $cpu_index"
    if answers "$cpu_index"; then
        run_pip --index-url "$cpu_index"
    else
        echo "  which does not answer: torch comes from PyPI instead, with some gigabytes of CUDA. TORCH_INDEX names another index."
    fi
fi
