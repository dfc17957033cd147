"""Rows with pictures: ids are those of transformers' generate with the same pictures, each is encoded once,
kept within a bound, and refused by itself.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.engine.attention import cpu_paged
from gpu_worker.engine.attention.sdpa import SdpaBackend
from gpu_worker.engine.batch.row_pictures import PictureState
from gpu_worker.engine.pictures.encoder import PictureEncoder
from tests.support.engine.pictures import models
from tests.support.engine.pictures.models import NEW_TOKENS, Seeing, SettledEngine, picture
from tests.support.engine.row_steps import plan
from tests.support.parameters.slow_but import slow_but


@pytest.fixture(scope="module", params=slow_but(["Qwen2.5-VL", "Gemma3"], models.FAMILIES))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp(request.param), request.param)


def test_ids_are_those_of_generate(seeing: Seeing) -> None:
    """Alone, beside rows of text, in chunks that end within pictures, and resumed."""
    assert seeing.engine.ready.pictures
    seeing.check()


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


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("qwen"), "Qwen2-VL")


@pytest.fixture
def encoded(qwen: Seeing, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the units that are encoded."""
    numbers: list[int] = []
    encode = PictureEncoder.encode

    def note(self: PictureEncoder, state: PictureState) -> None:
        numbers.append(state.num_encoded)
        encode(self, state)

    monkeypatch.setattr(PictureEncoder, "encode", note)
    return numbers


def encoder(qwen: Seeing) -> PictureEncoder:
    engine: Any = qwen.engine
    assert isinstance(engine, SettledEngine) and engine.engine.pictures
    return engine.engine.pictures


def drop_all(qwen: Seeing) -> None:
    """Forget what earlier tests have encoded."""
    encoder(qwen).held.clear()


def test_a_picture_is_encoded_once_for_all_rows_that_have_it(qwen: Seeing, encoded: list[int]) -> None:
    drop_all(qwen)
    assert qwen.play(qwen.prompts) == qwen.answers
    assert encoded == [0, 0, 0]  # rows 0 and 3 have the same one
    assert qwen.play({3: qwen.prompts[3]})[3] == qwen.answers[3]
    assert len(encoded) == 3


def test_encodings_beyond_the_bound_are_dropped_and_made_again(qwen: Seeing, encoded: list[int]) -> None:
    drop_all(qwen)
    own = encoder(qwen)
    qwen.play({3: qwen.prompts[3]})
    [held] = own.held.values()
    own.cache_bytes = held.embedding_bytes
    try:
        qwen.play({2: qwen.prompts[2]})
        assert sum(one.embedding_bytes for one in own.held.values()) <= own.cache_bytes
        assert qwen.play({3: qwen.prompts[3]})[3] == qwen.answers[3]
    finally:
        own.cache_bytes = 2**28
    assert len(encoded) == 4


@pytest.mark.parametrize("fault", ["no picture", "another size", "cut off", "missing"])
def test_a_bad_picture_ends_its_own_row_only(qwen: Seeing, fault: str) -> None:
    drop_all(qwen)
    prompt = qwen.prompts[3]
    [(start, count, _, data)] = prompt.pictures
    bad = {
        "no picture": (start, count, "bad", b"GIF89a no picture"),
        "another size": (start, count, "wide", picture(1, 16, 64)),
        "cut off": (start, count, "cut", data[: len(data) // 2]),
    }
    pictures = [bad[fault]] if fault in bad else []
    played = qwen.player()
    rows = [
        played.start(3, prompt.ids, NEW_TOKENS, pictures=pictures, ignore_eos=True),
        played.start(1, qwen.prompts[1].ids, NEW_TOKENS, ignore_eos=True),
        played.start(0, qwen.prompts[0].ids, NEW_TOKENS, pictures=qwen.prompts[0].pictures, ignore_eos=True),
    ]
    ids = played.run(rows)
    assert played.ended[3] == ("picture", 0)
    assert ids[1] == qwen.answers[1] and ids[0] == qwen.answers[0]
    assert len(played.free) == qwen.engine.ready.num_blocks


def test_a_failed_encoding_ends_its_rows_and_is_tried_again(
    qwen: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_all(qwen)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no memory for this picture")

    with monkeypatch.context() as patch:
        patch.setattr(type(encoder(qwen).tower), "encode", fail)
        played = qwen.player()
        rows = [
            played.start(3, qwen.prompts[3].ids, NEW_TOKENS, pictures=qwen.prompts[3].pictures),
            played.start(1, qwen.prompts[1].ids, NEW_TOKENS, ignore_eos=True),
        ]
        assert played.run(rows)[1] == qwen.answers[1]
        assert played.ended[3] == ("picture", 0)
    assert qwen.play({3: qwen.prompts[3]})[3] == qwen.answers[3]


def test_a_row_that_is_stopped_before_its_picture_is_processed_leaves_nothing(qwen: Seeing) -> None:
    drop_all(qwen)
    played = qwen.player()
    start = played.start(3, qwen.prompts[3].ids, NEW_TOKENS, pictures=qwen.prompts[3].pictures)
    qwen.engine.apply(plan(qwen.engine.rows.step, 100, [start]))
    qwen.engine.apply(plan(qwen.engine.rows.step + 9, 100, stops=[(3, "cancelled")]))
    step = qwen.engine.step()
    assert step and step.ended == [(3, "cancelled", 0)]
    assert qwen.play({2: qwen.prompts[2]})[2] == qwen.answers[2]
    assert len(encoder(qwen).held) == 2


def test_proposals_and_sleep(qwen: Seeing) -> None:
    """With n-grams, and after a sleep, ids are the same."""
    engine, own = qwen.start(speculate=3), qwen.engine
    qwen.engine = engine
    try:
        assert qwen.play(qwen.prompts) == qwen.answers
        engine.engine.sleep()
        engine.ready = engine.engine.wake_up(lambda text: None)
        assert qwen.play(qwen.prompts) == qwen.answers
    finally:
        qwen.engine = own


def test_a_model_without_a_processor_is_served_for_text(qwen: Seeing, tmp_path: Path) -> None:
    for file in qwen.model.folder.iterdir():
        if file.name not in ("preprocessor_config.json", "processor_config.json"):
            (tmp_path / file.name).symlink_to(file)
    blind = Seeing.__new__(Seeing)
    blind.model = replace(qwen.model, folder=tmp_path)
    blind.engine = blind.start()
    assert not blind.engine.ready.pictures
    assert blind.play({1: qwen.prompts[1]})[1] == qwen.answers[1]
