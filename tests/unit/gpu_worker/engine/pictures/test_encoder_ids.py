"""Ids of rows with pictures are those of transformers' `generate` with the same pictures: alone, batched with
rows of text, in chunks that end within a picture, behind blocks of others, and resumed.
"""

from pathlib import Path

import pytest

from gpu_worker.engine.attention import cpu_paged
from gpu_worker.engine.attention.sdpa import SdpaBackend
from tests.support.engine.pictures import models
from tests.support.engine.pictures.models import picture
from tests.support.engine.pictures.seeing import NEW_TOKENS, Seeing
from tests.support.parameters.slow_but import slow_but


@pytest.fixture(scope="module", params=slow_but(["Qwen2.5-VL", "Gemma3"], models.FAMILIES))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp(request.param), request.param)


def test_alone(seeing: Seeing) -> None:
    assert seeing.engine.ready.pictures
    for row, prompt in seeing.prompts.items():
        assert seeing.play({row: prompt})[row] == seeing.answers[row]


def test_answers_depend_on_the_pictures(seeing: Seeing) -> None:
    """Else the other tests would prove nothing."""
    other = seeing.model.prompt([4, 3], picture(4), [16, 17, 18])
    assert other.ids == seeing.prompts[3].ids
    assert seeing.model.generate(other, NEW_TOKENS) != seeing.answers[3]


def test_batched_with_rows_of_text(seeing: Seeing) -> None:
    assert seeing.play(seeing.prompts) == seeing.answers


def test_chunks_end_within_pictures(seeing: Seeing) -> None:
    assert seeing.play(seeing.prompts, prefill_tokens=7) == seeing.answers


def test_resumed(seeing: Seeing) -> None:
    played, base = seeing.player(), 5
    rows = {
        row: played.start(
            row,
            prompt.ids + seeing.answers[row][:base],
            NEW_TOKENS,
            base,
            pictures=prompt.pictures,
            ignore_eos=True,
        )
        for row, prompt in seeing.prompts.items()
    }
    expected = {row: ids[base:] for row, ids in seeing.answers.items()}
    assert played.run(list(rows.values())) == expected


@pytest.mark.parametrize("num_cached", [16, 32])
def test_behind_blocks_of_others(seeing: Seeing, num_cached: int) -> None:
    """Cached tokens end before, within and after pictures."""
    played = seeing.player()
    played.kept = set(played.free)
    firsts = [
        played.start(row, prompt.ids, NEW_TOKENS, pictures=prompt.pictures, ignore_eos=True)
        for row, prompt in seeing.prompts.items()
    ]
    played.run(firsts)
    again = {
        100 + row: played.start_behind(
            played.tables[row][: num_cached // seeing.engine.block_size],
            100 + row,
            prompt.ids,
            NEW_TOKENS,
            pictures=seeing.pictures_after(prompt, num_cached),
            ignore_eos=True,
        )
        for row, prompt in seeing.prompts.items()
        if len(prompt.ids) > num_cached
    }
    assert again
    ids = played.run(list(again.values()))
    assert {row: ids[row] for row in again} == {row: seeing.answers[row - 100] for row in again}


@pytest.mark.slow
def test_pictures_that_are_seen_as_one_with_torchs_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_paged, "supports", lambda geometry: False)
    seeing = Seeing(tmp_path, "Gemma3")
    assert isinstance(seeing.engine.engine.loaded.backend, SdpaBackend)
    assert seeing.play(seeing.prompts) == seeing.answers
    assert seeing.play(seeing.prompts, prefill_tokens=7) == seeing.answers
