"""Late text: the same texts, wherever the stream begins to lack them."""

import pytest

from api.streams.stream import LateText
from common.detokenize import Detokenizer
from tests.support.tokenizer import TOKENIZER, ids

IDS = ids("naïve café 🙂🚀 and नमस्ते, once more")


@pytest.mark.parametrize("num_known", [0, 1, 5, len(IDS) - 1])
def test_texts_are_those_of_the_worker(num_known: int) -> None:
    worker = Detokenizer(TOKENIZER, [28, 29])
    texts = [worker.step(token_id) for token_id in IDS]
    late = LateText(TOKENIZER, [28, 29])
    assert late.texts(IDS[:num_known], IDS[num_known:]) == texts[num_known:]


def test_known_tokens_are_followed_in_steps() -> None:
    late = LateText(TOKENIZER, [28])
    assert [late.see(IDS[:5], 2) for _ in range(3)] == [True, True, False]
    late.texts(IDS[:5], IDS[5:7])
    assert not late.see(IDS[:7], 1)
