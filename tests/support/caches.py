"""`python -m tests.support.caches`: fills the caches of a machine that has none, while tests are collected.

Modules need the bundled model's tokenizer when they are imported, tests the native kernels and the weights in
float32. The first process that needs one of them makes it, while all others would only wait.
"""

import os
import subprocess
import sys
from pathlib import Path

from common.model_files import BUNDLED, EXACT_DTYPE, find_local, resolve
from common.process.launch import die_with_parent

ROOT = Path(__file__).parents[2]


def fill_in_background() -> None:
    """Start this module, unless the machine has the model already."""
    if find_local(BUNDLED, None, "auto") is None:
        environ = os.environ | {"PARENT_PID": str(os.getpid())}
        subprocess.Popen([sys.executable, "-m", "tests.support.caches"], cwd=ROOT, env=environ)


def main() -> None:
    die_with_parent()
    subprocess.Popen([sys.executable, "-m", "gpu_worker.engine.cpu.compile"])
    for dtype in ("auto", EXACT_DTYPE):
        resolve(BUNDLED, dtype=dtype)


if __name__ == "__main__":
    main()
