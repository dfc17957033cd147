"""Failures of a device, and which devices a process sees. Each runs in a process of its own: a CUDA context
that is lost stays lost.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

from common.process.machine import list_gpus
from tests.support.engine import tiny_models
from tests.support.engine.on_cuda import ANYWHERE, FLASH_FAMILIES, ON_GPUS, SETTINGS, needs_flash
from tests.support.source_tree import python_path

LIMIT_S = 400
LOST = """
import os, sys, torch
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.engine.tiny_engine import play, prompts

folder, device = sys.argv[1:3]
engine = Engine(Settings(model_id=folder, device=device, dtype=sys.argv[3], **{settings!r}))
fresh, steps = dict(enumerate(prompts())), 0
play(engine, fresh)
print("it serves", flush=True)
compute = engine.forward

def lose(slices, previous):
    global steps
    steps += 1
    if steps >= 5:
        if device == "cuda":  # an index beyond a tensor: the kernel stops, and the context is lost
            torch.zeros(4, device=device)[torch.full((9,), 10**6, device=device)].add_(1)
        else:
            raise RuntimeError("the device is lost")
    return compute(slices, previous)

engine.forward = lose
try:
    play(engine, fresh)
except AssertionError as error:
    print("rows failed, and the engine went on:", error)
except RuntimeError as error:
    print("it ends:", type(error).__name__, flush=True)
    os._exit(7)
"""


def run(code: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": python_path()} | environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@ANYWHERE
def test_an_engine_whose_device_is_lost_ends(device: str, tmp_path: Path) -> None:
    """No row is failed for it, and none waits for ever: the worker's successor takes all of them."""
    needs_flash(device)
    tiny_models.save(tmp_path, *FLASH_FAMILIES["Llama"])
    dtype = "bfloat16" if device == "cuda" else "float32"
    ended = run(LOST.replace("{settings!r}", repr(SETTINGS)), str(tmp_path), device, dtype)
    assert "it serves" in ended.stdout, ended.stderr[-2000:]
    assert (ended.returncode, "it ends:" in ended.stdout) == (7, True), ended.stdout + ended.stderr[-2000:]


VISIBLE = """
import torch
from common.process.machine import visible_gpus
seen = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]
print(seen, visible_gpus())
"""


@ON_GPUS
def test_the_gpus_that_are_claimed_are_those_that_torch_sees(device: str) -> None:
    """By index and by UUID, in the order of the variable; none if it is empty."""
    uuids = [gpu.uuid for gpu in list_gpus()]
    assert len(uuids) >= torch.cuda.device_count() > 0
    backwards = ",".join(reversed(uuids))
    for chosen in ("0", uuids[0], backwards, ""):
        ended = run(VISIBLE, CUDA_VISIBLE_DEVICES=chosen, CUDA_DEVICE_ORDER="PCI_BUS_ID")
        assert ended.returncode == 0, ended.stderr[-2000:]
        seen, claimed = ended.stdout.strip()[1:-1].split("] [")
        assert seen == claimed and bool(seen) == bool(chosen), ended.stdout
