"""A step ahead on CUDA: the host waits for the device once a step, for sampled ids, and for nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.messages.request import LogitsParams, SamplingParams
from gpu_worker.engine.engine import Engine, InFlightStep
from gpu_worker.engine.sampling import sampler
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.on_cuda import ANYWHERE, FLASH_FAMILIES, ON_GPUS, engine_on, needs_flash
from tests.support.engine.tiny_engine import play_rows, prompts

NEW_TOKENS = 12
BUSY_CYCLES = 4 * 10**8
"""A fifth of a second and more of a GPU's time: far longer than a launch takes once all kernels are there."""
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"sampling": SamplingParams(temperature=0.8, seed=1)},
    "top-p": {"sampling": SamplingParams(temperature=0.8, top_p=0.9, seed=1)},
    "top-k, min-p": {"sampling": SamplingParams(temperature=0.8, top_k=20, min_p=0.01, seed=1)},
    "typical-p": {"sampling": SamplingParams(temperature=0.8, typical_p=0.9, seed=1)},
    "penalties": {
        "sampling": SamplingParams(
            temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.2, presence_penalty=0.2, seed=1
        )
    },
    "bias, bad words": {
        "sampling": SamplingParams(logit_bias=[(5, 3.0), (7, -3.0)], bad_words=[[5], [5, 6]])
    },
    "log-probabilities": {"top_n_tokens": 3, "prompt_logprobs": 2},
    "the model's own log-probabilities": {
        "sampling": SamplingParams(temperature=0.8, raw_logprobs=True, seed=1),
        "top_n_tokens": 3,
    },
    "logits": {"logits": LogitsParams(True, True, "float32", 1)},
    "logits in place of log-probabilities": {
        "sampling": SamplingParams(temperature=0.8, report_logits=True, seed=1),
    },
    "minimum length": {"min_new_tokens": NEW_TOKENS, "ignore_eos": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(folder, *FLASH_FAMILIES["Llama"])
    return folder


@pytest.fixture
def engine(device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    needs_flash(device)
    settings: dict[str, Any] = {"dtype": "bfloat16"} | ({} if device == "cuda" else {"kv_cache_bytes": 2**25})
    monkeypatch.setattr("gpu_worker.engine.engine.compile_layers", compile_on(device))
    return engine_on(device, folder, monkeypatch, **settings)


def compile_on(device: str) -> Callable[..., int]:
    """On CPU nothing is gained by compiling: the order of what is launched is the same."""
    from gpu_worker.engine.cuda.graphs import compile_layers

    return compile_layers if device == "cuda" else lambda *arguments: 0


def play(engine: Engine, prefill_tokens: int, options: list[dict[str, Any]]) -> Player:
    """One row for each of `options`."""
    rows = {row: prompts()[row % 4] for row in range(len(options))}
    return play_rows(engine, rows, prefill_tokens, NEW_TOKENS, horizon=64, params=dict(enumerate(options)))


@ANYWHERE
def test_a_step_is_launched_before_the_one_before_it_is_read(
    device: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, launch, collect = list[tuple[str, int]](), engine.launch, engine.collect

    def note_launch(before: InFlightStep | None = None) -> InFlightStep | None:
        launched = launch(before)
        if launched:
            events.append(("launch", launched.number))
        return launched

    def note_read(flight: InFlightStep) -> float:
        events.append(("read", flight.number))
        return collect(flight)

    monkeypatch.setattr(engine, "launch", note_launch)
    monkeypatch.setattr(engine, "collect", note_read)
    play(engine, 1000, [{}, {}])
    numbers = sorted(number for what, number in events if what == "launch")
    assert len(numbers) >= NEW_TOKENS and [number for what, number in events if what == "read"] == numbers
    late = [
        number
        for number in numbers[1:]
        if events.index(("launch", number)) > events.index(("read", number - 1))
    ]
    assert late == [], "launched after the read of the step before"


@ON_GPUS
@pytest.mark.parametrize("options", OPTIONS)
def test_no_launch_waits_for_the_device(
    device: str, engine: Engine, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits and is known to torch raises. What waits unknown to it finds the device busy, and
    not busy any more after.
    """
    rows, waited, launch, sample = (
        [OPTIONS[options], {}, OPTIONS[options]],
        list[str](),
        engine.launch,
        engine.sample,
    )
    for prefill_tokens in (1000, 7):
        play(engine, prefill_tokens, rows)  # every kernel is there, and pinned memory

    def watched(name: str, does: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any) -> Any:
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
            busy.record()
            torch.cuda.set_sync_debug_mode("error")
            try:
                result = does(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            if busy.query():  # type: ignore[no-untyped-call]
                waited.append(name)
            return result

        return do

    monkeypatch.setattr(engine, "launch", watched("launch", launch))
    monkeypatch.setattr(engine, "sample", watched("sample", sample))
    played = play(engine, 1000, rows)
    assert [len(ids) for ids in played.ids.values()] == [NEW_TOKENS] * 3 and waited == []
    played = play(engine, 7, rows)  # rows that decode beside chunks of prompts
    assert [len(ids) for ids in played.ids.values()] == [NEW_TOKENS] * 3 and waited == []


READS = tuple(
    f"aten::{name}" for name in ("item", "_local_scalar_dense", "nonzero", "masked_select", "equal")
)
"""Operations that give the host a value, or a shape that depends on values."""


class ReadsForbidden(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it no tensor may be read: on CUDA the host would wait for the device."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert operation._schema.name not in READS, f"{operation} waits for the device"
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu"])
def test_no_launch_reads_a_tensor(device: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(does: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any) -> Any:
            with ReadsForbidden():  # type: ignore[no-untyped-call]
                return does(*arguments)

        return do

    monkeypatch.setattr(sampler, "kernels", lambda logits: None)
    monkeypatch.setattr(engine, "launch", watched(engine.launch))
    monkeypatch.setattr(engine, "sample", watched(engine.sample))
    played = play(engine, 40, [*OPTIONS.values()])  # rows that decode beside chunks of prompts
    assert [len(ids) for ids in played.ids.values()] == [NEW_TOKENS] * len(OPTIONS)
