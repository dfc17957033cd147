"""What becomes of the pictures of rows: encoded once, kept within a bound, refused by themselves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.engine.batch.encoding import EncodedUnit
from gpu_worker.engine.pictures.encoder import PictureEncoder
from gpu_worker.protocol import Grant
from tests.support.engine.pictures.models import SettledEngine, picture
from tests.support.engine.pictures.seeing import NEW_TOKENS, Seeing


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("qwen"), "Qwen2-VL")


@pytest.fixture
def encoded(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the units that are encoded."""
    numbers: list[int] = []
    encode = PictureEncoder.encode

    def note(self: PictureEncoder, unit: EncodedUnit) -> None:
        numbers.append(unit.number)
        encode(self, unit)

    monkeypatch.setattr(PictureEncoder, "encode", note)
    return numbers


def encoder(seeing: Seeing) -> PictureEncoder:
    engine: Any = seeing.engine
    assert isinstance(engine, SettledEngine) and engine.engine.pictures
    return engine.engine.pictures


def drop_all(seeing: Seeing) -> None:
    """Forget what earlier tests have encoded."""
    encoder(seeing).held.clear()


def test_a_picture_is_encoded_once_for_all_rows_that_have_it(seeing: Seeing, encoded: list[int]) -> None:
    drop_all(seeing)
    assert seeing.play(seeing.prompts) == seeing.answers
    assert encoded == [0, 0, 0]  # rows 0 and 3 have the same one
    assert seeing.play({3: seeing.prompts[3]})[3] == seeing.answers[3]
    assert len(encoded) == 3


def test_encodings_beyond_the_bound_are_dropped_and_made_again(seeing: Seeing, encoded: list[int]) -> None:
    drop_all(seeing)
    own = encoder(seeing)
    seeing.play({3: seeing.prompts[3]})
    [held] = own.held.values()
    own.cache_bytes = held.embedding_bytes
    try:
        seeing.play({2: seeing.prompts[2]})
        assert sum(one.embedding_bytes for one in own.held.values()) <= own.cache_bytes
        assert seeing.play({3: seeing.prompts[3]})[3] == seeing.answers[3]
    finally:
        own.cache_bytes = 2**28
    assert len(encoded) == 4


@pytest.mark.parametrize("fault", ["no picture", "another size", "cut off", "missing"])
def test_a_bad_picture_ends_its_own_row_only(seeing: Seeing, fault: str) -> None:
    drop_all(seeing)
    prompt = seeing.prompts[3]
    [(start, count, _, data)] = prompt.pictures
    bad = {
        "no picture": (start, count, "bad", b"GIF89a no picture"),
        "another size": (start, count, "wide", picture(1, 16, 64)),
        "cut off": (start, count, "cut", data[: len(data) // 2]),
    }
    pictures = [bad[fault]] if fault in bad else []
    played = seeing.player()
    rows = [
        played.start(3, prompt.ids, NEW_TOKENS, pictures=pictures, ignore_eos=True),
        played.start(1, seeing.prompts[1].ids, NEW_TOKENS, ignore_eos=True),
        played.start(
            0, seeing.prompts[0].ids, NEW_TOKENS, pictures=seeing.prompts[0].pictures, ignore_eos=True
        ),
    ]
    ids = played.run(rows)
    assert played.ended[3] == ("picture", 0)
    assert ids[1] == seeing.answers[1] and ids[0] == seeing.answers[0]
    assert len(played.free) == seeing.engine.ready.num_blocks


def test_a_failed_encoding_ends_its_rows_and_is_tried_again(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_all(seeing)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no memory for this picture")

    with monkeypatch.context() as patch:
        patch.setattr(type(encoder(seeing).tower), "encode", fail)
        played = seeing.player()
        rows = [
            played.start(3, seeing.prompts[3].ids, NEW_TOKENS, pictures=seeing.prompts[3].pictures),
            played.start(1, seeing.prompts[1].ids, NEW_TOKENS, ignore_eos=True),
        ]
        assert played.run(rows)[1] == seeing.answers[1]
        assert played.ended[3] == ("picture", 0)
    assert seeing.play({3: seeing.prompts[3]})[3] == seeing.answers[3]


def test_a_row_that_is_stopped_before_its_picture_is_processed_leaves_nothing(seeing: Seeing) -> None:
    drop_all(seeing)
    played = seeing.player()
    start = played.start(3, seeing.prompts[3].ids, NEW_TOKENS, pictures=seeing.prompts[3].pictures)
    seeing.engine.apply(Grant(seeing.engine.rows.step, 100, [start]))
    seeing.engine.apply(Grant(seeing.engine.rows.step + 9, 100, stops=[(3, "cancelled")]))
    step = seeing.engine.step()
    assert step and step.ended == ((3, "cancelled", 0),)
    assert seeing.play({2: seeing.prompts[2]})[2] == seeing.answers[2]
    assert len(encoder(seeing).held) == 2


def test_proposals_and_sleep(seeing: Seeing) -> None:
    """With n-grams, and after a sleep, ids are the same."""
    engine, own = seeing.start(speculate=3), seeing.engine
    seeing.engine = engine
    try:
        assert seeing.play(seeing.prompts) == seeing.answers
        engine.engine.sleep()
        engine.ready = engine.engine.wake_up(lambda text: None)
        assert seeing.play(seeing.prompts) == seeing.answers
    finally:
        seeing.engine = own


def test_a_model_without_a_processor_is_served_for_text(seeing: Seeing, tmp_path: Path) -> None:
    for file in seeing.model.folder.iterdir():
        if file.name not in ("preprocessor_config.json", "processor_config.json"):
            (tmp_path / file.name).symlink_to(file)
    blind = Seeing.__new__(Seeing)
    blind.model = replace(seeing.model, folder=tmp_path)
    blind.engine = blind.start()
    assert not blind.engine.ready.pictures
    assert blind.play({1: seeing.prompts[1]})[1] == seeing.answers[1]
