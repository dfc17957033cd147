"""What of an answer's text is shown, and when."""

from hypothesis import given
from hypothesis import strategies as st

from api.answers.logprobs import token_bytes
from api.answers.stop_holdback import StopHoldback
from api.streams.stream import Stream
from common.detokenize import StopMatcher
from common.messages.events import Terminal, Tokens
from common.messages.records import pack_floats, pack_ids
from common.messages.request import Generate, StoppingParams
from tests.support.tokenizer import IM_END, TOKENIZER, ids, model_tokenizer

LETTERS = "ab"
PLAIN = ids("a")[0]


def generated(
    texts: list[str], stops: list[str], min_new_tokens: int = 0, special: int | None = None
) -> Stream:
    """A stream with these texts, up to the first stop string, as a worker would have made it."""
    stream = Stream(
        Generate("r", "", pack_ids([1]), StoppingParams(99, min_new_tokens, stops)), model_tokenizer()
    )
    matcher, reason = StopMatcher(stops), "length"
    for i, text in enumerate(texts):
        token_id = IM_END if i == special else PLAIN
        stream.add_event(Tokens("r", 1, i, pack_ids([token_id]), pack_floats([-1.0]), [text]))
        if i >= min_new_tokens and matcher.step(text):
            reason = "stop_sequence"
            break
    stream.end(Terminal("r", reason, stream.num_tokens))
    return stream


def shown(
    stream: Stream, include_stop: bool = False, hidden_ids: frozenset[int] = frozenset({IM_END})
) -> tuple[list[str], StopHoldback]:
    text = StopHoldback(stream, hidden_ids, include_stop)
    pieces = [text.step() for _ in range(stream.num_tokens - 1)]
    return [*pieces, text.last()], text


@given(
    texts=st.lists(st.text(LETTERS, max_size=3), min_size=1, max_size=12),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    min_new_tokens=st.integers(0, 4),
    include_stop=st.booleans(),
)
def test_stop_strings_are_cut_out_and_nothing_else(
    texts: list[str], stops: list[str], min_new_tokens: int, include_stop: bool
) -> None:
    stream = generated(texts, stops, min_new_tokens)
    pieces, text = shown(stream, include_stop)
    begin = len("".join(texts[:min_new_tokens]))
    whole = "".join(stream.texts)
    ends = [(whole.index(stop, begin) + len(stop), stop) for stop in stops if stop in whole[begin:]]
    if ends:
        end = min(ends)[0]
        stop = max((stop for at, stop in ends if at == end), key=len)
        whole = whole[: end - (0 if include_stop else len(stop))]
        assert text.stop_reason == stop
    assert "".join(pieces) == whole


@given(
    texts=st.lists(st.text(LETTERS, max_size=3), min_size=1, max_size=12),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
)
def test_no_more_is_held_back_than_may_be_part_of_a_stop_string(texts: list[str], stops: list[str]) -> None:
    stream = generated(texts, stops)
    text, so_far = StopHoldback(stream, {IM_END}, False), ""
    for i in range(stream.num_tokens - 1):
        so_far += text.step()
        whole = "".join(texts[: i + 1])
        assert whole.startswith(so_far)
        held = whole[len(so_far) :]
        assert any(stop.startswith(held) and stop != held for stop in stops) or not held
        longer = [whole[k:] for k in range(len(so_far)) if any(stop.startswith(whole[k:]) for stop in stops)]
        assert not longer, "shown, although a stop string may begin there"


def test_special_tokens_are_not_shown_but_count_in_stop_strings() -> None:
    texts = ["one", "<|im_end|>", " two", " three"]
    assert shown(generated(texts, [], special=1))[0] == ["one", "", " two", " three"]
    assert shown(generated(texts, [], special=1), hidden_ids=frozenset())[0] == texts
    pieces, _ = shown(generated(texts, ["e<|im_end|> t"], special=1))
    assert pieces == ["on", "", ""]
    assert shown(generated(texts, ["one two"], special=1))[0] == ["", "one", " tw", "o three"]
    assert shown(generated(["a", "<|im_end|>", "b"], ["end|>c"], special=1))[0] == ["a", "", "b"]


def test_a_token_that_ends_the_answer_is_not_shown() -> None:
    for reason, stop_reason in (("eos_token", None), ("stop_sequence", PLAIN)):
        stream = generated(["one", " two"], [])
        stream.terminal = Terminal("r", reason, 2)
        pieces, text = shown(stream)
        assert (pieces, text.stop_reason) == (["one", ""], stop_reason)
        assert shown(stream, include_stop=True)[0] == ["one", " two"]


def test_bytes_of_tokens_add_up_to_the_text() -> None:
    for text in ("é", " naïve", "🙂", "日本の", "\n\t x", "a<0x41>"):
        assert b"".join(token_bytes(TOKENIZER, token_id) for token_id in ids(text)) == text.encode()
    assert token_bytes(TOKENIZER, IM_END) == b"<|im_end|>"
    assert token_bytes(TOKENIZER, 10**7) == b""
