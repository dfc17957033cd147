"""A bounded number of bytes is tokenized at once, in order; the bound on a text holds for every text."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from api.event_loop import LONG_SIZE
from api.prompts.tokenizer import BYTE_TOKENS, SHORT_BYTES, TextBound, TextBudget, text_bound
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

# --- tokenizer ----------------------------------------------------------------------------------------------

MAX_BYTES = 8 * SHORT_BYTES
"""Of these the lane of short texts has a quarter."""


class Works:
    """Works that end when they are told to."""

    def __init__(self, num_threads: int = 8) -> None:
        self.budget = TextBudget(MAX_BYTES, num_threads)
        self.running: list[str] = []
        self.ends: dict[str, threading.Event] = {}
        self.tasks: dict[str, asyncio.Task[str]] = {}

    def start(self, name: str, size: int) -> None:
        self.ends[name] = threading.Event()
        self.tasks[name] = asyncio.create_task(self.budget.run(size, lambda: self.work(name)))

    def work(self, name: str) -> str:
        self.running.append(name)
        assert self.ends[name].wait(30)
        self.running.remove(name)
        return name

    async def end(self, name: str) -> str:
        self.ends[name].set()
        return await self.tasks[name]

    async def until(self, *names: str) -> None:
        await wait_until(lambda: sorted(self.running) == sorted(names))


@pytest.fixture
async def works() -> AsyncIterator[Works]:
    works = Works()
    yield works
    for end in works.ends.values():
        end.set()
    await asyncio.gather(*works.tasks.values(), return_exceptions=True)


async def test_short_work_is_done_at_once_and_errors_come_back() -> None:
    budget, here = TextBudget(MAX_BYTES), threading.get_ident()
    assert await budget.run(LONG_SIZE - 1, threading.get_ident) == here
    assert await budget.run(LONG_SIZE, threading.get_ident) != here
    assert await budget.run(SHORT_BYTES + 1, threading.get_ident) != here
    for size in (LONG_SIZE, SHORT_BYTES + 1):
        with pytest.raises(ZeroDivisionError):
            await budget.run(size, lambda: 1 / 0)
    assert (budget.short.num_bytes, budget.long.num_bytes) == (0, 0)


async def test_texts_wait_in_order_and_one_larger_than_all_goes_alone(works: Works) -> None:
    sizes: dict[str, Any] = {"a": 3, "b": 3, "huge": 50, "c": 2}
    for name, units in sizes.items():
        works.start(name, units * SHORT_BYTES)
    await works.until("a", "b")
    await works.end("a")
    await works.until("b")  # there is room for `c`, but it came after `huge`
    await works.end("b")
    await works.until("huge")
    await works.end("huge")
    await works.until("c")
    assert await works.end("c") == "c"
    assert works.budget.long.num_bytes == 0


async def test_short_texts_have_a_lane_of_their_own(works: Works) -> None:
    works.start("huge", 50 * SHORT_BYTES)
    works.start("next", 50 * SHORT_BYTES)
    for name in ("a", "b", "c"):
        works.start(name, SHORT_BYTES)
    await works.until("huge", "a", "b")
    await works.end("a")
    await works.until("huge", "b", "c")


@pytest.mark.parametrize(
    ("num_threads", "names"), [(1, ("long",)), (2, ("long", "a")), (3, ("long", "next", "a"))]
)
async def test_validation_workers_bound_the_threads(num_threads: int, names: tuple[str, ...]) -> None:
    """One thread is left to the short lane, if there are several."""
    works = Works(num_threads)
    for name, size in (("long", 2), ("next", 2), ("last", 2), ("a", 1), ("b", 1), ("c", 1)):
        works.start(name, size * SHORT_BYTES)
    await works.until(*names)
    for end in works.ends.values():
        end.set()
    assert await asyncio.gather(*works.tasks.values()) == list(works.tasks)
    assert len(works.budget.threads._threads) <= num_threads


async def test_a_caller_that_leaves_gives_its_room_back_when_its_work_has_ended(works: Works) -> None:
    for name in ("a", "waiting", "b"):
        works.start(name, 6 * SHORT_BYTES)
    await works.until("a")
    works.tasks["waiting"].cancel()
    works.tasks["a"].cancel()
    await asyncio.gather(works.tasks["a"], works.tasks["waiting"], return_exceptions=True)
    assert works.running == ["a"] and works.budget.long.num_bytes == 6 * SHORT_BYTES
    works.ends["a"].set()
    await works.until("b")
    assert await works.end("b") == "b"
    assert works.budget.long.num_bytes == 0


async def test_a_caller_that_leaves_just_when_its_turn_comes_gives_it_back(works: Works) -> None:
    lane = works.budget.long
    taken = await lane.acquire(lane.max_bytes)
    waiting = asyncio.create_task(lane.acquire(1))
    await asyncio.sleep(0)
    lane.release(taken)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert lane.num_bytes == 0 and not lane.waiting


# --- tokenizer bounds ---------------------------------------------------------------------------------------

WORDS = {"a": 0, "b": 1, "ab": 2, "▁": 3, "▁a": 4, "é": 5, "<0x00>": 6}
BYTES = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"aa": 256}


def bpe(vocabulary: dict[str, int] = WORDS, **options: Any) -> Tokenizer:
    merges = [("a", "b"), ("▁", "a")] if vocabulary is WORDS else [("a", "a")]
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))


def composed(tokenizer: Tokenizer, normalizer: Any = None, splitter: Any = None) -> Tokenizer:
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    return tokenizer


def with_token(token: AddedToken) -> Tokenizer:
    tokenizer = bpe(BYTES)
    tokenizer.add_special_tokens([token])
    return tokenizer


bound_of = functools.cache(text_bound)
"""It reads a whole vocabulary: once, not for each text."""
PREPENDED = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
BOUNDED = [
    TOKENIZER,
    composed(bpe(BYTES), normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    composed(
        bpe(BYTES), None, pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    ),
]


@pytest.mark.parametrize("tokenizer", BOUNDED)
@given(text=st.text() | st.text("ạ̈ \n1é<|im_end>\x04") | st.text("ᾧ̓͂ͅ가각"))
def test_no_text_has_fewer_tokens_than_the_bound_says(tokenizer: Tokenizer, text: str) -> None:
    bound = bound_of(tokenizer)
    assert bound is not None
    assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


UNBOUNDED: Sequence[tuple[str, Tokenizer]] = [
    ("unknown characters in a row are one token", bpe(unk_token="é", fuse_unk=True)),
    ("unknown characters are dropped", bpe()),
    ("bytes that are no token are dropped", composed(bpe(), None, pre_tokenizers.ByteLevel())),
    ("a word is one token", Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))),
    ("spaces are left out", composed(bpe(unk_token="é"), None, pre_tokenizers.Whitespace())),
    (
        "matches are left out",
        composed(bpe(unk_token="é"), None, pre_tokenizers.Split(Regex(" "), "removed")),
    ),
    ("spaces at the ends are left out", composed(bpe(unk_token="é"), normalizers.Strip())),
    ("any number is one", composed(bpe(unk_token="é"), normalizers.Replace(Regex("a+"), "a"))),
    ("a token takes the spaces beside it", with_token(AddedToken("<s>", rstrip=True))),
]


@pytest.mark.parametrize(("why", "tokenizer"), UNBOUNDED, ids=[why for why, _ in UNBOUNDED])
def test_there_is_no_bound_where_a_token_may_stand_for_any_text(why: str, tokenizer: Tokenizer) -> None:
    assert text_bound(tokenizer) is None


def test_sentencepiece_s_tokens_have_a_character_for_each_of_the_text() -> None:
    known = WORDS | {token: i + len(WORDS) for i, token in enumerate(sorted(BYTE_TOKENS - WORDS.keys()))}
    model = models.BPE(vocab=known, merges=[("a", "b")], byte_fallback=True, fuse_unk=True, unk_token="é")
    tokenizer = composed(Tokenizer(model), normalizers.Sequence(PREPENDED))
    assert text_bound(tokenizer) == TextBound(len("<0x00>"))


def test_characters_that_the_bundled_model_does_not_know_count_as_nothing() -> None:
    bound = text_bound(TOKENIZER)
    assert bound is not None and bound.least_tokens("\x04" * 10_000) == 0
    assert bound.least_tokens("a" * 10_000) == -(-10_000 // 81)
