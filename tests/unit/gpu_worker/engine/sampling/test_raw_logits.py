"""Raw logits of rows are those of transformers, however rows are batched, chunked, split or resumed."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.messages.request import SamplingParams
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sampling import logprobs
from gpu_worker.protocol import StepResult
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_engine import engine_of, prompts
from tests.support.engine.tiny_models import FAMILIES, VOCAB

NEW_TOKENS = 6
TRIED = [
    "Llama",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("Qwen3", "Gemma2", "GPT2", "Phi3", "Qwen3-MoE")
    ),
]
PENALISED = SamplingParams(
    temperature=1.3, top_k=7, seed=5, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias=[(9, 4.0)]
)
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=TRIED)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Any]]:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_models.save(folder, *FAMILIES[request.param])
    yield engine_of(folder), model


def player(engine: Engine, prefill_tokens: int = 1000) -> Player:
    return Player(engine, list(range(1, engine.ready.num_blocks + 1)), prefill_tokens, until=engine.rows.step)


def rows_of(played: Player, row: int, first: int, dtype: str = "<f4") -> Floats:
    """The logits that a row returned, from position `first` on, without a gap."""
    found: list[Floats] = []
    for begin, values in sorted(played.logits[row].items()):
        assert begin == first + len(found)
        found += [*np.frombuffer(values, dtype).reshape(-1, VOCAB)]
    return np.array(found)


def expected(model: Any, ids: Sequence[int], first: int) -> Floats:
    """transformers' logits of all positions but the last token's, from `first` on."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, first:-1].float().numpy()
    return np.asarray(logits)


def check(played: Player, model: Any, known: dict[int, list[int]], firsts: dict[int, int]) -> None:
    for row, first in firsts.items():
        found, wanted = rows_of(played, row, first), expected(model, known[row] + played.ids[row], first)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=f"row {row}")


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("prefill_tokens", [1000, 7])
def test_logits_are_those_of_transformers(
    served: tuple[Engine, Any], prefill_tokens: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of context and generation, of the generation alone, with penalties, and beside rows without."""
    engine, model = served
    monkeypatch.setattr(engine, "runs_ahead", ahead)
    played, known = player(engine, prefill_tokens), dict(enumerate(prompts()))
    firsts = {0: 0, 1: len(known[1]) - 1, 2: 0}
    played.run(
        [
            played.start(row, ids, NEW_TOKENS, ignore_eos=True, logits=span(firsts.get(row)), sampling=how)
            for (row, ids), how in zip(known.items(), (None, None, PENALISED, PENALISED), strict=True)
        ]
    )
    check(played, model, known, firsts)
    assert played.logits.keys() == firsts.keys()


def span(first: int | None, end: int = 1000, dtype: str = "float32") -> tuple[int, int, str] | None:
    return None if first is None else (first, end, dtype)


def test_logits_of_the_context_end_with_the_prompt(served: tuple[Engine, Any]) -> None:
    """Also where earlier tokens are computed as a prefill."""
    engine, model = served
    ids, played = prompts()[1], player(engine, 13)
    played.run([played.start(0, ids, 3, ignore_eos=True, logits=span(0, len(ids)))])
    first = rows_of(played, 0, 0)
    np.testing.assert_allclose(first, expected(model, [*ids, 0], 0), rtol=1e-4, atol=1e-4)
    again, shown = player(engine, 13), played.ids[0][:2]
    again.run([again.start(0, ids + shown, 3, base=2, ignore_eos=True, logits=span(0, len(ids)))])
    np.testing.assert_allclose(rows_of(again, 0, 0), first, rtol=1e-4, atol=1e-4)
    assert again.ids[0] == played.ids[0][2:]


@pytest.mark.parametrize("prefill_tokens", [1000, 5])
def test_a_resumed_row_returns_the_logits_of_earlier_tokens(
    served: tuple[Engine, Any], prefill_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few of them a step, while rows that ask for none go on."""
    engine, model = served
    monkeypatch.setattr(engine.rows, "max_scored_tokens", 3)
    ids = prompts()[1]
    whole = player(engine)
    whole.run([whole.start(0, ids, NEW_TOKENS, ignore_eos=True)])
    played, shown = player(engine, prefill_tokens), whole.ids[0][:4]
    known = {0: ids + shown, 1: ids + shown}
    firsts = {0: 0, 1: len(ids) - 1}
    played.run(
        [
            played.start(row, known[row], NEW_TOKENS, base=4, ignore_eos=True, logits=span(first))
            for row, first in firsts.items()
        ]
        + [played.start(2, ids, 1)]
    )
    check(played, model, known, firsts)
    assert played.ids[0] == played.ids[1] == whole.ids[0][4:]
    assert prefill_tokens < 10 or any(row == 2 for row, *_ in played.steps[0].sampled)


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "<f2"), ("bfloat16", "<u2")])
def test_logits_have_the_dtype_that_is_asked_for(served: tuple[Engine, Any], dtype: str, kind: str) -> None:
    engine, _ = served
    ids, found = prompts()[1], {}
    for one in ("float32", dtype):
        played = player(engine)
        played.run([played.start(0, ids, 2, ignore_eos=True, logits=span(0, dtype=one))])
        found[one] = b"".join(values for _, values in sorted(played.logits[0].items()))
    exact = torch.frombuffer(bytearray(found["float32"]), dtype=torch.float32)
    assert exact.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes() == found[dtype]
    assert np.frombuffer(found[dtype], kind).size == (len(ids) + 1) * VOCAB


def test_pieces_and_frames_are_bounded(served: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = served
    monkeypatch.setattr(logprobs, "MAX_PIECE_BYTES", 3 * 4 * VOCAB)
    ids, played = prompts()[1], player(engine)
    played.run([played.start(0, ids, 2, ignore_eos=True, logits=span(0))])
    assert max(map(len, played.logits[0].values())) == 3 * 4 * VOCAB
    check(played, model, {0: ids}, {0: 0})


def test_most_logits_come_in_frames_before_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.protocol.MAX_FRAME_LOGITS", 10)
    pieces = [(1, 0, b"123456"), (2, 5, b"1234"), (1, 3, b"123456789012"), (3, 0, b"1")]
    frames = list(StepResult(7, b"samples", logits=tuple(pieces)).frames)
    assert [(frame.step, [*frame.logits], frame.samples) for frame in frames] == [
        (6, pieces[:2], b""),
        (6, pieces[2:3], b""),
        (7, pieces[3:], b"samples"),
    ]
    [alone] = StepResult(7, b"samples").frames
    assert alone == StepResult(7, b"samples", logits=[])
