"""Log-probabilities of prompts against a float64 reference and transformers; raw logits are those of
transformers, however rows are batched, chunked, split or resumed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.messages.request import LogitsParams, SamplingParams
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sampling.sampler import score_tokens
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import AHEAD, Player, player
from tests.support.engine.reference import prompt_ids, reference_ids, reference_logprobs
from tests.support.engine.sampling_reference import log_softmax
from tests.support.engine.tiny_engine import engine_of
from tests.support.engine.tiny_engine import prompts as tiny_prompts
from tests.support.engine.tiny_models import FAMILIES, VOCAB
from tests.support.parameters.slow_but import slow_but
from tests.support.prompts import FEW, PROMPTS

INDICES = FEW[:-1]
TOPS = 3
NEW_TOKENS = 3


def random_logits(num_tokens: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = 8 * torch.randn(num_tokens, size, generator=generator)
    logits[:, 3] = -torch.inf
    return logits.to(dtype), torch.randint(0, size, (num_tokens,), generator=generator)


@pytest.mark.usefixtures("each_sampler")
@pytest.mark.parametrize(
    ("num_tokens", "size", "dtype"),
    [(1, 5, torch.float32), (37, 1000, torch.float16), (23, 49152, torch.bfloat16)],
)
def test_logprobs_equal_a_float64_reference(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    """In one chunk and in several; -inf for impossible tokens; of equally likely ones the lower id first."""
    logits, ids = random_logits(num_tokens, size, dtype)
    before = logits.clone()
    found = score_tokens(logits, ids, 4)
    expected = np.stack([log_softmax(line) for line in logits.double().numpy()])
    places = np.arange(num_tokens)
    assert torch.equal(found.ids, ids) and torch.equal(logits, before)
    np.testing.assert_allclose(found.logprobs.numpy(), expected[places, ids.numpy()], rtol=1e-6, atol=2e-6)
    tops = np.argsort(-expected, axis=-1, kind="stable")[:, :4]
    np.testing.assert_array_equal(found.top_ids.numpy(), tops)
    np.testing.assert_allclose(
        found.top_logprobs.numpy(), np.take_along_axis(expected, tops, -1), rtol=1e-6, atol=2e-6
    )


@pytest.mark.usefixtures("each_sampler")
def test_bits_do_not_depend_on_the_number_of_scored_tokens() -> None:
    logits, ids = random_logits(40, 100_003, torch.float32)
    logits /= 8  # flatter: many tokens contribute to the sum
    alone = [score_tokens(logits[row : row + 1], ids[row : row + 1], 0).logprobs for row in range(len(ids))]
    assert torch.equal(torch.cat(alone), score_tokens(logits, ids, 0).logprobs)


# --- an engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompt_ids(PROMPTS)


def check_scored(played: Player, prompts: list[list[int]], indices: list[int]) -> None:
    """Prompt log-probabilities are those of transformers, and the generated ids are as without them."""
    answers = dict(zip(indices, reference_ids([prompts[index] for index in indices], 40), strict=True))
    for index, expected in zip(
        indices, reference_logprobs([prompts[index] for index in indices]), strict=True
    ):
        logprobs, tops = played.prompt_logprobs.get(index, []), played.prompt_tops.get(index, [])
        found = [[own, *top.values()] for own, top in zip(logprobs, tops, strict=True)]
        assert len(found) == len(expected)
        np.testing.assert_allclose(
            np.array(found), np.array(expected), rtol=1e-4, atol=1e-4, err_msg=f"prompt {index}"
        )
        for token, logprob, top in zip(prompts[index][1:], logprobs, tops, strict=True):
            assert top.get(token, logprob) == logprob
        assert played.ids[index] == answers[index][:NEW_TOKENS]


@AHEAD
def test_only_rows_that_request_logprobs_get_them(engine: Engine, prompts: list[list[int]]) -> None:
    """Prefilled in chunks of at most 7 tokens, which end anywhere in a block."""
    played = player(engine, 7)
    scored = INDICES[1::2]
    starts = [
        played.start(index, prompts[index], NEW_TOKENS, prompt_logprobs=TOPS if index in scored else None)
        for index in INDICES
    ]
    played.run(starts)
    check_scored(played, prompts, scored)
    assert played.prompt_logprobs.keys() == {index for index in scored if len(prompts[index]) > 1}
    assert all(
        len(logprobs) <= 4 * 7 for step in played.steps for _, _, logprobs, _, _ in step.prompt_logprobs
    )


NUM_NEW = 6
TRIED = slow_but(["Llama"], ["Llama", "Gemma2"])
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


def rows_of(played: Player, row: int, first: int) -> Floats:
    """The logits that a row returned, from position `first` on, without a gap."""
    found: list[Floats] = []
    for begin, values in sorted(played.logits[row].items()):
        assert begin == first + len(found)
        found += [*np.frombuffer(values, "<f4").reshape(-1, VOCAB)]
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


@pytest.mark.parametrize(("prefill_tokens", "ahead"), [(1000, False), (7, True)])
def test_logits_are_those_of_transformers(
    served: tuple[Engine, Any], prefill_tokens: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of context and generation, of the generation alone, with penalties, and beside rows without."""
    engine, model = served
    monkeypatch.setattr(engine, "runs_ahead", ahead)
    played, known = player(engine, prefill_tokens), dict(enumerate(tiny_prompts()))
    firsts = {0: 0, 1: len(known[1]) - 1, 2: 0}
    played.run(
        [
            played.start(row, ids, NUM_NEW, ignore_eos=True, logits=span(firsts.get(row)), sampling=how)
            for (row, ids), how in zip(known.items(), (None, None, PENALISED, PENALISED), strict=True)
        ]
    )
    check(played, model, known, firsts)
    assert played.logits.keys() == firsts.keys()


def span(first: int | None, generation: bool = True) -> LogitsParams | None:
    """Logits from position 0 on, or of the generation alone."""
    return None if first is None else LogitsParams(first == 0, generation, "float32", 1)


def test_logits_of_the_context_end_with_the_prompt(served: tuple[Engine, Any]) -> None:
    """Also where earlier tokens are computed as a prefill."""
    engine, model = served
    ids, played = tiny_prompts()[1], player(engine, 13)
    played.run([played.start(0, ids, 3, ignore_eos=True, logits=span(0, generation=False))])
    first = rows_of(played, 0, 0)
    np.testing.assert_allclose(first, expected(model, [*ids, 0], 0), rtol=1e-4, atol=1e-4)
    again, shown = player(engine, 13), played.ids[0][:2]
    again.run([again.start(0, ids + shown, 3, base=2, ignore_eos=True, logits=span(0, generation=False))])
    np.testing.assert_allclose(rows_of(again, 0, 0), first, rtol=1e-4, atol=1e-4)
    assert again.ids[0] == played.ids[0][2:]


def test_a_resumed_row_returns_the_logits_of_earlier_tokens(
    served: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few of them a step, while rows that ask for none go on."""
    engine, model = served
    monkeypatch.setattr(engine.rows, "max_scored_tokens", 3)
    ids = tiny_prompts()[1]
    whole = player(engine)
    whole.run([whole.start(0, ids, NUM_NEW, ignore_eos=True)])
    played, shown = player(engine), whole.ids[0][:4]
    known = {0: ids + shown, 1: ids + shown}
    firsts = {0: 0, 1: len(ids) - 1}
    played.run(
        [
            played.start(row, known[row], NUM_NEW, base=4, ignore_eos=True, logits=span(first))
            for row, first in firsts.items()
        ]
        + [played.start(2, ids, 1)]
    )
    check(played, model, known, firsts)
    assert played.ids[0] == played.ids[1] == whole.ids[0][4:]
    assert any(row == 2 for row, *_ in played.steps[0].sampled)
