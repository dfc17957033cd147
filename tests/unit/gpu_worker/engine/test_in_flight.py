"""What of a step would make the host wait for a GPU before the step is read, found on CPU: operations whose
result the host looks at.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.messages.request import SamplingParams
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sampling import native_sampler
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_engine import prompts
from tests.support.engine.tiny_models import FAMILIES
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
FAMILIES_TRIED = (
    "Qwen2",
    "Phi3-longrope",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("Qwen3-MoE", "GPT2", "gpt-oss", "OPT", "StableLM")
    ),
)
ASKED: list[dict[str, Any]] = [
    {"top_n_tokens": 2, "prompt_logprobs": 2, "min_new_tokens": 4, "logits": (0, 100, "bfloat16")},
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


@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_no_operation_waits_for_the_device_before_a_step_is_read(
    family: str,
    tmp_path: Path,
    like_cuda: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny_models.save(tmp_path, *FAMILIES[family])
    monkeypatch.setattr(native_sampler, "kernels", lambda logits: None)  # as on a GPU
    engine = like_cuda(tmp_path)
    with Waits() as waits:
        played = run(engine)
        answers = {tuple(ids): played.ids[row] for row, ids in enumerate(prompts())}
        engine.rows.make_proposer = KnowingProposers(answers, 0.3, is_sure=True)
        assert run(engine).ids == played.ids
    assert waits.found == set()


def run(engine: Engine) -> Player:
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), 40, until=engine.rows.step)
    played.run([played.start(row, ids, NEW_TOKENS, **ASKED[row]) for row, ids in enumerate(prompts())])
    return played
