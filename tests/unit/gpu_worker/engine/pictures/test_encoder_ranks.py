"""Pictures on several ranks, which each have the tower, and in stages, of which the first has it: ids are
those of `generate`, and a bad picture ends its own row only.
"""

from pathlib import Path

import pytest

from tests.support.engine.multi_rank_engine import Led, running
from tests.support.engine.pictures.seeing import NEW_TOKENS, SETTINGS, Seeing

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_stages", [1, 2], ids=["tensors", "stages"])
def test_two_ranks(num_stages: int, tmp_path: Path) -> None:
    with running(2, num_stages) as ranks:
        for name in ("SmolVLM", "Qwen2-VL"):
            seeing = Seeing(tmp_path / name, name)
            with Led(ranks, model_id=str(seeing.model.folder), **SETTINGS) as engine:
                seeing.engine = engine
                assert engine.ready.pictures
                assert seeing.play(seeing.prompts) == seeing.answers
                assert seeing.play(seeing.prompts, prefill_tokens=7) == seeing.answers
                played = seeing.player()
                bad = [
                    (start, count, "bad", b"no picture") for start, count, *_ in seeing.prompts[3].pictures
                ]
                rows = [
                    played.start(3, seeing.prompts[3].ids, NEW_TOKENS, pictures=bad),
                    played.start(1, seeing.prompts[1].ids, NEW_TOKENS, ignore_eos=True),
                ]
                assert played.run(rows)[1] == seeing.answers[1]
                assert played.ended[3] == ("picture", 0)
