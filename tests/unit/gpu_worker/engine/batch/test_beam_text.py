"""Beam texts: stop strings in the texts of beams that have their beginning in common."""

from common.detokenize import Detokenizer, StopMatcher
from gpu_worker.engine.batch.beams import BeamText
from tests.support.tokenizer import TOKENIZER


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def text_after(text: BeamText, ids: list[int]) -> BeamText:
    for token in ids:
        text = text.after(token)
    return text


def test_a_stop_string_ends_the_beam_that_has_it_alone() -> None:
    root = BeamText(Detokenizer(TOKENIZER, ids_of("The story:")), StopMatcher(["the end"]), 0)
    common = text_after(root, ids_of(" and this is the"))
    ended, going_on = text_after(common, ids_of(" end")), text_after(common, ids_of(" beginning"))
    assert ended.matched and not going_on.matched and not common.matched and not root.matched
    assert text_after(going_on, ids_of(" of the end")).matched


def test_the_first_tokens_end_no_beam() -> None:
    ids = ids_of("the end and the end")
    root = BeamText(Detokenizer(TOKENIZER, ids_of("Say:")), StopMatcher(["the end"]), len(ids_of("the end")))
    assert not text_after(root, ids[:-1]).matched and text_after(root, ids).matched
