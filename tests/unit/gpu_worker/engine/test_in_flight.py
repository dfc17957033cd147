"""Steps in flight: what would make the host wait for a GPU, and how long a launch waits."""

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.messages.request import LogitsParams, SamplingParams
from gpu_worker.engine.engine import Engine, LaunchPace
from gpu_worker.engine.sampling import sampler
from tests.support.engine import tiny_models
from tests.support.engine.tiny_engine import play_rows, prompts
from tests.support.engine.tiny_models import FAMILIES
from tests.support.parameters.slow_but import slow_but
from tests.support.speculation.knowing_proposer import KnowingProposers

NEW_TOKENS = 6
WAITING = {
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_consecutive",
    "bincount",
}
FAMILIES_TRIED = ("Qwen2", "Phi3-longrope", "Qwen3-MoE", "gpt-oss")
ASKED: list[dict[str, Any]] = [
    {
        "top_n_tokens": 2,
        "prompt_logprobs": 2,
        "min_new_tokens": 4,
        "logits": LogitsParams(True, True, "bfloat16", 1),
    },
    {
        "sampling": SamplingParams(
            temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.2, frequency_penalty=0.2
        )
    },
    {
        "sampling": SamplingParams(temperature=0.8, typical_p=0.9, raw_logprobs=True, report_logits=True),
        "top_n_tokens": 3,
    },
    {"sampling": SamplingParams(logit_bias=[(5, 3.0)], bad_words=[[5], [6, 7]])},
]


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations that wait; those of the fake FlashInfer are left out: the real one has none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        picks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if (name in WAITING or picks) and not any("fake_flashinfer" in path for path in paths()):
            self.found.add(f"{name} in {[path for path in paths() if '/torch/' not in path][:3]}")
        return func(*args, **(kwargs or {}))


def paths() -> list[str]:
    """Where this was called, the innermost first."""
    frame: Any = sys._getframe(2)
    lines = []
    while frame:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return lines


@pytest.mark.parametrize("family", slow_but(["Qwen2"], FAMILIES_TRIED))
def test_no_operation_waits_for_the_device_before_a_step_is_read(
    family: str,
    tmp_path: Path,
    like_cuda: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny_models.save(tmp_path, *FAMILIES[family])
    monkeypatch.setattr(sampler, "kernels", lambda logits: None)  # as on a GPU
    engine = like_cuda(tmp_path)
    rows, asked = dict(enumerate(prompts())), dict(enumerate(ASKED))
    play: Any = partial(play_rows, engine, rows, 40, NEW_TOKENS, params=asked, ignore_eos=False)
    with Waits() as waits:
        played = play()
        answers = {tuple(ids): played.ids[row] for row, ids in enumerate(prompts())}
        engine.rows.make_proposer = KnowingProposers(answers, 0.3, is_sure=True)
        assert play().ids == played.ids
    assert waits.found == set()


STEP_S = 0.01


class Device:
    """A device that computes a step in STEP_S, and a host that is late by up to `late_s` wherever it waits.

    Attributes:
        idle_s: how long no step ran.
        leads_s: how long before the end of a step the next one was launched, of each.
        started_s: of the step that runs.
    """

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s
        self.draw = random.Random(1)
        self.pace = LaunchPace()
        self.now_s, self.free_s = 100.0, 100.0 + STEP_S
        self.started_s = 100.0
        self.idle_s = 0.0
        self.leads_s: list[float] = []

    def step(self) -> None:
        """Launch a step, and read the one before it."""
        self.now_s += max(0.0, self.pace.slack_s(self.now_s)) + self.draw.uniform(0.0, self.late_s)
        launched_s = self.now_s
        self.leads_s.append(self.free_s - self.now_s)
        self.pace.on_launch(is_late=self.now_s >= self.free_s)
        end_s, began_s = self.free_s, max(self.now_s, self.free_s)
        self.idle_s += began_s - end_s
        self.free_s = began_s + STEP_S
        self.now_s = max(self.now_s, end_s)
        self.pace.on_read(self.started_s, self.now_s, 0)
        self.started_s = launched_s


@pytest.mark.parametrize("late", [0.0, 0.3])
def test_a_launch_waits_for_most_of_a_step_and_the_device_does_not_wait(late: float) -> None:
    device = Device(late * STEP_S)
    for _ in range(2000):
        device.step()
    leads_s, idle_s = device.leads_s[1000:], device.idle_s
    assert sum(leads_s) / len(leads_s) < (late + 0.2) * STEP_S
    assert idle_s < 0.01 * 2000 * STEP_S
