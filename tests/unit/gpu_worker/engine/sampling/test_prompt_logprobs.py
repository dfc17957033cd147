"""Log-probabilities of prompts: the function against a float64 reference, the engine against transformers."""

import numpy as np
import pytest
import torch

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sampling import logprobs as module
from gpu_worker.engine.sampling import native_sampler
from gpu_worker.engine.sampling.logprobs import score_tokens
from gpu_worker.engine.sampling.multinomial import raw_logprobs
from tests.support.engine.batch_player import Player
from tests.support.engine.reference import prompt_ids, reference_ids, reference_logprobs
from tests.support.engine.sampling_reference import log_softmax
from tests.support.prompts import FEW, PROMPTS
from tests.support.runahead.each_way import AHEAD, IN_TURN

INDICES = [
    pytest.param(FEW[:-1], id="few"),
    pytest.param(list(range(len(PROMPTS))), id="all", marks=pytest.mark.slow),
]
TOPS = 3
NEW_TOKENS = 3


def random_logits(num_tokens: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = 8 * torch.randn(num_tokens, size, generator=generator)
    logits[:, 3] = -torch.inf
    return logits.to(dtype), torch.randint(0, size, (num_tokens,), generator=generator)


@pytest.mark.usefixtures("each_sampler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 5), (37, 1000), (23, 49152)])
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
def test_no_top_tokens_are_returned_unless_requested() -> None:
    logits, ids = random_logits(6, 50, torch.float32)
    found = score_tokens(logits, ids, 0)
    assert found.top_ids.shape == found.top_logprobs.shape == (6, 0)
    assert torch.equal(found.logprobs, score_tokens(logits, ids, 5).logprobs)


@pytest.mark.usefixtures("each_sampler")
def test_bits_do_not_depend_on_the_number_of_scored_tokens() -> None:
    logits, ids = random_logits(40, 100_003, torch.float32)
    logits /= 8  # flatter: many tokens contribute to the sum
    alone = [score_tokens(logits[row : row + 1], ids[row : row + 1], 0).logprobs for row in range(len(ids))]
    assert torch.equal(torch.cat(alone), score_tokens(logits, ids, 0).logprobs)


def test_torch_copies_a_bounded_number_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_sizes: list[int] = []
    monkeypatch.setattr(native_sampler, "kernels", lambda logits: None)
    monkeypatch.setattr(
        module,
        "raw_logprobs",
        lambda logits, *others: (chunk_sizes.append(logits.numel()), raw_logprobs(logits, *others))[1],  # type: ignore[func-returns-value]
    )
    logits, ids = random_logits(23, 1000, torch.bfloat16)
    whole = score_tokens(logits, ids, 2)
    assert chunk_sizes == [logits.numel()]
    monkeypatch.setattr(module, "MAX_CHUNK_LOGITS", 5999)
    chunked = score_tokens(logits, ids, 2)
    assert chunk_sizes[1:] == [5000] * 4 + [3000]
    for found, in_chunks in zip(whole, chunked, strict=True):
        torch.testing.assert_close(found, in_chunks, rtol=1e-6, atol=1e-6)


# --- an engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompt_ids(PROMPTS)


def player(engine: Engine, prefill_tokens: int = 10_000) -> Player:
    return Player(engine, list(range(1, 1 + engine.ready.num_blocks)), prefill_tokens, until=engine.rows.step)


def check(played: Player, prompts: list[list[int]], indices: list[int]) -> None:
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
@pytest.mark.parametrize("indices", INDICES)
def test_a_prompt_alone_has_its_logprobs(
    engine: Engine, prompts: list[list[int]], indices: list[int]
) -> None:
    for index in indices:
        played = player(engine)
        played.run([played.start(index, prompts[index], NEW_TOKENS, prompt_logprobs=TOPS)])
        check(played, prompts, [index])


@AHEAD
@pytest.mark.parametrize("prefill_tokens", [10_000, 7])
@pytest.mark.parametrize("indices", INDICES)
def test_only_rows_that_request_logprobs_get_them(
    engine: Engine, prompts: list[list[int]], indices: list[int], prefill_tokens: int
) -> None:
    """Prefilled whole, or in chunks of at most 7 tokens, which end anywhere in a block."""
    played = player(engine, prefill_tokens)
    scored = indices[1::2]
    starts = [
        played.start(index, prompts[index], NEW_TOKENS, prompt_logprobs=TOPS if index in scored else None)
        for index in indices
    ]
    played.run(starts)
    check(played, prompts, scored)
    assert played.prompt_logprobs.keys() == {index for index in scored if len(prompts[index]) > 1}
    assert all(
        len(logprobs) <= 4 * prefill_tokens
        for step in played.steps
        for _, _, logprobs, _, _ in step.prompt_logprobs
    )


@IN_TURN
def test_rows_of_one_batch_may_request_different_logprobs(engine: Engine, prompts: list[list[int]]) -> None:
    """One without top tokens, one with top tokens of its samples too, one that resumes and gets none."""
    played = player(engine)
    ids = prompts[20]
    [answer] = reference_ids([ids], 40)
    played.run(
        [
            played.start(0, ids, 1, prompt_logprobs=0),
            played.start(1, ids, 1, prompt_logprobs=2, top_n_tokens=1),
            played.start(2, [*ids, *answer[:2]], NEW_TOKENS, base=2),
        ]
    )
    [expected] = reference_logprobs([ids])
    for number in (0, 1):
        np.testing.assert_allclose(
            played.prompt_logprobs[number], [own for own, *_ in expected], rtol=1e-4, atol=1e-4
        )
    assert (
        played.prompt_logprobs.keys() == {0, 1}
        and not any(played.prompt_tops[0])
        and {len(top) for top in played.prompt_tops[1]} == {2}
    )
    assert played.ids == {0: answer[:1], 1: answer[:1], 2: answer[2:3]}


@IN_TURN
def test_scored_tokens_of_a_step_are_bounded(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without prompt log-probabilities are not delayed by that."""
    monkeypatch.setattr(engine.rows, "max_scored_tokens", 16)
    played, scored = player(engine), [15, 20]
    played.run(
        [played.start(index, prompts[index], NEW_TOKENS, prompt_logprobs=TOPS) for index in scored]
        + [played.start(4, prompts[4], 1)]
    )
    check(played, prompts, scored)
    assert (
        max(sum(len(logprobs) // 4 for _, _, logprobs, _, _ in step.prompt_logprobs) for step in played.steps)
        <= 16
    )
    assert any(row == 4 for step in played.steps[:2] for row, *_ in step.sampled)
