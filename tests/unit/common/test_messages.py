"""Messages: their form on the wire, which processes of two versions share; what is packed comes out.
Detokenizer: complete characters, right spacing, stop strings anywhere.
The registry of adapters: what each change leaves, and that none of two changes at once is lost.

Committed state: the request's string and the log of its worker, read as one.
"""

import asyncio
import dataclasses
import importlib
import types
import typing
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from api.streams.stream import clean_text
from common import model_files
from common.adapter_registry import MAX_ADAPTERS, AdapterRegistry, change_registry, read_registry
from common.adapters import LOADING, READY, HeldAdapters, PoolAdapter, adapter_name
from common.broker import committed
from common.broker.committed import Committed, read
from common.broker.pool_client import ChangeRefused, PoolClient
from common.detokenize import MAX_INCOMPLETE_TOKENS, Detokenizer, StopMatcher, concatenates, piece_cache
from common.messages.codec import WireError, decode, encode
from common.messages.events import Events
from common.messages.plan import Report
from common.messages.records import (
    RECORD,
    BeamSequence,
    pack_floats,
    pack_ids,
    pack_records,
    pack_sequences,
    unpack_columns,
    unpack_ids,
    unpack_records,
)
from common.messages.request import Cancel, extend_hashes, root_hash
from tests.support.broker_state import KEYS, admit, make_request, make_tokens, place, start_worker, write_log
from tests.support.events import unpack_sequences

# --- codec --------------------------------------------------------------------------------------------------

MODULES = """
api.answers.answer api.webhooks common.adapters common.api_keys common.broker.directory common.messages.events
common.messages.kept_answer common.messages.plan common.messages.request
""".split()
WIRE = """
Reading ca re pe to na pa ol sr ei
Rendering dt lp us ru sk is po rd ti ni pt js
AnswerTerms ow bo go ke
ResponseParts f b i
InferOutputs i o
VectorAnswer f b d n q r t x
AnswerTrace r p s
HttpAnswer id ro st cr mo fp n pr rq px re tm rp in tr ve nu nc
PoolAdapter n p d s r b a f e
HeldAdapters l r
AdapterLoad r
ApiKey id dg tn cl w mc rm tm bt ms ad ex rv am nm ca wu ws
PoolEntry a m mi tn r l w rw c s ad
Tokens id a i t l x ti tl ss nc sp
TokenColumns id a i r x
Terminal id w n e y
Events s q t x f c
TimelineEvent t w i a n y c
Timeline h
KeptRequests p ch dg a o
KeptAnswer id b f cn ns h ct c hd x rq hv
KeeperMessage k d r t l
NewRow r a b s k q nc ct su
Plan e n u pt s b x k t mp mr ra bt
HeldRow r id a b n k kv s x nc
Report q e n s p x r t h lr l bh st ln rt sn
WorkerCapacity i nm m d bs nb pt c eo w dv mi pc sb tn vs sn la lr pi mr po ap tm md
WorkerDied i
LogitsParams c g d v
PoolingParams ps
SamplingParams t k p m y r f e l s c b w d n i x g a wd wg rl
BeamParams w l e d n
StoppingParams mx mn st si ie
UsageAccount m pp bt
Picture d s n
Generate id dg p sp sa tp pl tl ch gw gr rt cl tn sh cs bh ns bm lo tr ky we ac ad pi po wh
Cancel id w
Resume id
Webhook u s k i
"""
"""Of each message the short names of its fields, in order: new ones come last and have a default."""
EXAMPLES: dict[Any, Any] = {bool: True, int: 258, float: -0.5, str: "é", bytes: b"\xff\0", type(None): None}


def messages() -> dict[str, Any]:
    """The classes of all messages by their names."""
    found = {}
    for name in MODULES:
        for item in vars(importlib.import_module(name)).values():
            if isinstance(item, type) and dataclasses.is_dataclass(item) and item.__module__ == name:
                fields = dataclasses.fields(item)
                if fields and all("wire" in one.metadata for one in fields):
                    found[item.__name__] = item
    return found


MESSAGES = messages()
EVERY_MESSAGE = pytest.mark.parametrize(
    "name", sorted(MESSAGES.keys() - {"LogitsParams"})
)  # "v" is a field of it


def example(kind: Any) -> Any:
    """A value of a type, with a value in each field and each list."""
    inner = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return typing.cast(Any, kind)(
            **{one.name: example(hints[one.name]) for one in dataclasses.fields(kind)}
        )
    match typing.get_origin(kind):
        case typing.Union | types.UnionType:
            return example(inner[0])
        case origin if origin is list:
            return [example(inner[0])]
        case origin if origin is tuple:
            return tuple(map(example, inner))
        case origin if origin is dict:
            return {example(inner[0]): example(inner[1])}
        case typing.Literal:
            return inner[0]
    return EXAMPLES[kind]


def test_fields_keep_their_names_on_the_wire() -> None:
    found = {
        name: " ".join(one.metadata["wire"] for one in dataclasses.fields(cls))
        for name, cls in MESSAGES.items()
    }
    assert found == dict(line.split(" ", 1) for line in WIRE.strip().splitlines())


@EVERY_MESSAGE
def test_a_message_is_read_back_unknown_fields_are_ignored_and_wrong_types_refused_by_name(name: str) -> None:
    message = example(MESSAGES[name])
    body = msgpack.unpackb(encode(message), strict_map_key=False)
    assert body.pop("v") == 1
    assert decode(type(message), msgpack.packb(body | {"v": 1, "new": [1, {"a": 2}]})) == message
    for field, value in body.items():
        wrong = 1.5 if not isinstance(value, float) else "x"
        with pytest.raises(WireError, match=name):
            decode(type(message), msgpack.packb(body | {"v": 1, field: wrong}))


def test_bytes_of_a_message_never_change() -> None:
    assert encode(Cancel("r1", "client")) == b"\x83\xa1v\x01\xa2id\xa2r1\xa1w\xa6client"
    assert encode(PoolAdapter("sql", "/s", "ab", READY, 8, "m", 5)) == (
        b"\x8a\xa1v\x01\xa1n\xa3sql\xa1p\xa2/s\xa1d\xa2ab\xa1s\xa5ready\xa1r\x08\xa1b\xa1m\xa1a\x05\xa1f\xa0\xa1e\x00"
    )
    assert RECORD.pack(258, -0.5) == b"\x02\x01\0\0\0\0\0\xbf"
    assert unpack_ids(b"\xff\xff\xff\xff") == [-1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"garbage",
        msgpack.packb([1]),
        msgpack.packb({"v": 1}),
        msgpack.packb({"v": 2, "id": "r", "w": "x"}),
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(Cancel, data)


TOKEN = {"id": "r", "a": 1, "i": 0, "t": b"", "l": b""}


@pytest.mark.parametrize(
    ("token", "fault"),
    [
        (TOKEN | {"x": ["a", 1]}, ".texts.1: Input should be a valid string"),
        ({}, ".request_id: Field required"),
        (1, ": Input should be a dictionary or an instance of Tokens"),
    ],
)
def test_a_fault_is_named_by_the_fields_that_lead_to_it(token: Any, fault: str) -> None:
    with pytest.raises(WireError, match=f"^Events.tokens.1{fault}$"):
        decode(Events, msgpack.packb({"v": 1, "s": "w", "q": 1, "t": [TOKEN, token]}))


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ({"r": [[1, 2], [1]]}, "released.1.1: Field required"),
        ({"r": [[1, True]]}, "released.0.1: Input should be a valid integer"),
        ({"r": [3]}, "released.0: Input should be a valid tuple"),
        ({"x": [[1, 2, 3]]}, "ended.0.1: Input should be a valid string"),
        ({"s": True}, "step: Input should be a valid integer"),
    ],
)
def test_a_tuple_has_as_many_values_as_its_type_and_of_these_types(rows: Any, fault: str) -> None:
    with pytest.raises(WireError, match=f"^Report.{fault}$"):
        decode(Report, msgpack.packb({"v": 1, "q": 1, "e": 1, "n": 1, "s": 1} | rows))


# --- records ------------------------------------------------------------------------------------------------


def columns(num_tokens: int, num_top: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Packed ids, log-probabilities, and those of the likeliest tokens; all different."""
    num = num_tokens * num_top
    return (
        pack_ids(range(num_tokens)),
        pack_floats([-float(i) for i in range(num_tokens)]),
        pack_ids(range(1000, 1000 + num)),
        pack_floats([-1000.0 - i for i in range(num)]),
    )


def test_records_are_a_token_and_its_likeliest_in_order() -> None:
    top_ids, top_logprobs = pack_ids([7, 8, 9, 10]), pack_floats([-1.0, -2.0, -3.0, -4.0])
    packed = pack_records(pack_ids([1, 2]), pack_floats([-0.5, -0.25]), top_ids, top_logprobs)
    pairs = [(1, -0.5), (7, -1.0), (8, -2.0), (2, -0.25), (9, -3.0), (10, -4.0)]
    assert packed == b"".join(RECORD.pack(*pair) for pair in pairs)
    likeliest = [[(7, -1.0), (8, -2.0)], [(9, -3.0), (10, -4.0)]]
    assert unpack_records(packed, 3) == ([1, 2], [-0.5, -0.25], likeliest)


@pytest.mark.parametrize("num_top", [0, 1, 3])
@given(num_tokens=st.integers(1, 5), skipped=st.integers(0, 4))
def test_columns_come_back_from_any_token_on(num_top: int, num_tokens: int, skipped: int) -> None:
    ids, logprobs, top_ids, top_logprobs = columns(num_tokens, num_top)
    first = min(skipped, num_tokens - 1)
    width = 1 + num_top
    packed = bytearray(pack_records(ids, logprobs, top_ids, top_logprobs))
    assert unpack_columns(packed, first * width * RECORD.size, width) == (
        ids[4 * first :],
        logprobs[4 * first :],
        top_ids[4 * first * num_top :],
        top_logprobs[4 * first * num_top :],
    )


# --- beams --------------------------------------------------------------------------------------------------

SEQUENCES = [
    BeamSequence([5, 6, 7], [-0.5, -0.25, -1.0], -0.5, "eos_token"),
    BeamSequence([], [], 0.0, "stop_sequence"),
    BeamSequence([0], [-2.0], -2.0, "length"),
]


def test_sequences_come_out_as_they_were_packed() -> None:
    assert unpack_sequences(pack_sequences(SEQUENCES)) == SEQUENCES


# --- block hashes -------------------------------------------------------------------------------------------

IDS = list(range(70))


def test_hashes_are_the_same_in_every_version() -> None:
    """Workers and gateways of two versions may run at once."""
    hashes = extend_hashes(root_hash(""), pack_ids(IDS[:16]))
    assert hashes.hex() == "cae66941d9efbd404e4d88758ea67670724f387046a7ef1970878eae3ed5c2d2"


# --- detokenize ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_file(str(model_files.resolve("smollm2") / "tokenizer.json"))


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    """A small tokenizer of the SentencePiece kind: ▁ for spaces, bytes for what it has no piece for, the
    first space stripped.
    """
    pieces = ["<unk>", "<s>", "▁", "▁Hello", "▁world", "ly", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(
            dict(zip(pieces, range(len(pieces)), strict=True)), [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def texts(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [detokenizer.step(token_id) for token_id in ids]


@settings(max_examples=50)
@given(prompt=st.text(max_size=8), text=st.text(max_size=40))
def test_the_pieces_of_any_text_are_the_text(smollm2: Tokenizer, prompt: str, text: str) -> None:
    ids = smollm2.encode(text).ids
    assume(
        "\ufffd" not in text and smollm2.decode(ids, skip_special_tokens=False) == text
    )  # its vocabulary has not all bytes
    prompt_ids = smollm2.encode(prompt).ids
    assert "".join(texts(smollm2, prompt_ids, ids)) == text
    assert clean_text(smollm2, prompt_ids, ids) == text


def test_endless_invalid_bytes_do_not_wait_for_ever(smollm2: Tokenizer) -> None:
    half = smollm2.encode("𐍈").ids[0]
    pieces = texts(smollm2, [], [half] * (2 * MAX_INCOMPLETE_TOKENS))
    assert max(map(len, pieces)) <= MAX_INCOMPLETE_TOKENS
    assert len("".join(pieces)) > MAX_INCOMPLETE_TOKENS


def test_the_first_piece_keeps_its_space(llama: Tokenizer) -> None:
    hello, world, special = (id_of(llama, piece) for piece in ("▁Hello", "▁world", "<s>"))
    assert texts(llama, [special, hello], [world, special, hello]) == [" world", "<s>", " Hello"]
    assert texts(llama, [], [hello, world]) == ["Hello", " world"]
    assert clean_text(llama, [special, hello], [world, hello]) == " world Hello"


@pytest.mark.parametrize(
    ("stops", "pieces", "matched"),
    [
        ([], ["a"], [False]),
        (["b"], ["a", "abc", "x"], [False, True, True]),
        (["END"], ["E", "N", "x", "EN", "D!"], [False, False, False, False, True]),
        (["\n\n"], ["a\n", "\nb"], [False, True]),
        (["long stop", "x"], ["long", "", " st", "op"], [False, False, False, True]),
        (["🙂🚀"], ["", "🙂", "", "🚀"], [False, False, False, True]),
    ],
)
def test_stop_strings_are_found_inside_and_across_pieces(
    stops: list[str], pieces: list[str], matched: list[bool]
) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.step(piece) for piece in pieces] == matched


def decoded(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> list[str]:
    """What each token adds, without the cache."""
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [detokenizer.decode_step(token_id) for token_id in ids]


@settings(max_examples=50)
@given(data=st.data())
@pytest.mark.parametrize("name", ["smollm2", "llama"])
def test_cached_pieces_are_what_the_tokens_add(
    name: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    """Few tokens, so they repeat: spaces, parts of characters, invalid bytes, special tokens, unknown ids."""
    tokenizer: Tokenizer = request.getfixturevalue(name)
    if name == "llama":
        some: list[int] | range = range(tokenizer.get_vocab_size() + 1)
    else:
        some = [*tokenizer.encode(" the sea\n\n🙂  日本𐍈<|im_end|>\x00'll").ids, 10**6]
    token = st.sampled_from(some)
    prompt_ids, ids = data.draw(st.lists(token, max_size=7)), data.draw(st.lists(token, max_size=60))
    assert texts(tokenizer, prompt_ids, ids) == decoded(tokenizer, prompt_ids, ids)


def test_pieces_are_cached_only_if_the_decoder_concatenates(smollm2: Tokenizer, llama: Tokenizer) -> None:
    """With WordPiece a token depends on its neighbours: `##` joins it to the one before."""
    assert concatenates(smollm2) and concatenates(llama)
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "sea": 1, "##side": 2, "the": 3}, unk_token="[UNK]"))
    for decoder in (
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("e s", "ES")]),
    ):
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.decoder = decoder
        assert not concatenates(tokenizer)
        ids = [3, 1, 2, 1, 3, 1, 2, 3, 2, 1]
        assert texts(tokenizer, [3], ids) == decoded(tokenizer, [3], ids)
        assert not piece_cache(tokenizer)


# --- registry -----------------------------------------------------------------------------------------------

SQL, NEWER = PoolAdapter("sql", "/sql", "a" * 64), PoolAdapter("sql", "/newer", "b" * 64)
EMPTY = AdapterRegistry()


def test_a_registry_has_at_most_so_many_adapters() -> None:
    full = EMPTY
    for i in range(MAX_ADAPTERS):
        full = full.put(replace(SQL, name=f"a{i}"))
    with pytest.raises(ChangeRefused, match=f"there are {MAX_ADAPTERS} adapters, which is the most"):
        full.with_loading(SQL, in_place=False)
    fewer = {key: one for key, one in full.adapters.items() if one.name != "a0"}
    assert replace(full, adapters=fewer).with_loading(SQL, in_place=False)


async def test_changes_at_once_are_all_kept_and_what_another_program_wrote_is_no_adapter(
    redis: Redis,
) -> None:
    pool = PoolClient(redis, KEYS)
    made = [replace(SQL, name=f"a{i}") for i in range(8)]

    async def put(adapter: PoolAdapter) -> None:
        await change_registry(pool, lambda found: found.put(adapter))

    await asyncio.gather(*map(put, made))
    await redis.hset(KEYS.adapters, "x@1", "nonsense")  # type: ignore[misc]
    found = await read_registry(pool)
    assert {*found.adapters} == {one.key for one in made}
    assert await change_registry(pool, lambda same: same) == found, "what changes nothing is not written"
    assert await redis.pttl(KEYS.adapters) > 0


def test_names_and_states_of_adapters() -> None:
    held = HeldAdapters(["sql@1"], [("b@2", 7, "why")])
    assert decode(HeldAdapters, encode(held)) == held
    assert (SQL.key, adapter_name(SQL.key), adapter_name("")) == (f"sql@{'a' * 16}", "sql", "")
    assert SQL.state == LOADING


# --- committed ----------------------------------------------------------------------------------------------


def records(*ids: int) -> bytes:
    return b"".join(RECORD.pack(token_id, -1.0) for token_id in ids)


async def read_one(redis: Redis) -> Committed:
    return (await read(PoolClient(redis, KEYS), ["r1"]))["r1"]


def ids(state: Committed) -> list[int]:
    return unpack_records(state.records, state.width)[0]


@pytest.mark.parametrize(
    ("index", "new", "expected"),
    [
        (0, [1, 2], [1, 2]),  # known already
        (0, [1, 2, 3], [1, 2, 3]),  # overlaps
        (2, [3, 4], [1, 2, 3, 4]),  # follows
        (3, [4], [1, 2]),  # a token before it is missing
        (1, [9], [1, 2]),  # what is committed is never replaced
    ],
)
def test_append_adds_what_follows(index: int, new: list[int], expected: list[int]) -> None:
    state = Committed(records=records(1, 2))
    state.append(make_tokens("r", index, new))
    assert ids(state) == expected


async def test_a_request_that_moves_while_it_is_read_is_read_again(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on w1 at the first look, and on w2, which has committed more, at the second."""
    for incarnation in ("w1", "w2"):
        await start_worker(redis, incarnation)
    await admit(redis, make_request("r1"))
    await place(redis, "r1", "w1")
    await write_log(redis, "w1", make_tokens("r1", 0, [1]))
    await write_log(redis, "w2", make_tokens("r1", 1, [2], attempt=2))
    read_slice, looks = committed.read_slice, []

    async def move_after_first(pool: PoolClient, *args: Any, **options: Any) -> Any:
        states = await read_slice(pool, *args, **options)
        looks.append(states["r1"].worker)
        if len(looks) == 1:
            await redis.set(KEYS.tokens("r1"), records(1))
            await place(redis, "r1", "w2", attempt=2, base=1)
        return states

    monkeypatch.setattr(committed, "read_slice", move_after_first)
    assert ids(await read_one(redis)) == [1, 2]
    assert looks == ["w1", "w2", "w2"]


async def test_what_is_spilled_between_two_reads_is_not_lost(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spill empties the log into the string, between the reads of both."""
    await start_worker(redis, "w1")
    await admit(redis, make_request("r1"))
    await place(redis, "r1", "w1")
    await redis.set(KEYS.tokens("r1"), records(1))
    await write_log(redis, "w1", make_tokens("r1", 1, [2, 3]))
    read_slice, xrange, reads = committed.read_slice, redis.xrange, [""]

    async def spill_after(answer: Any, what: str) -> Any:
        reads.append(what)
        if len(reads) == 3:
            await redis.append(KEYS.tokens("r1"), records(2, 3))
            await redis.delete(KEYS.log("w1"))
        return answer

    async def read_log(*args: Any) -> Any:
        return await spill_after(await xrange(*args), "log")

    async def read_strings(*args: Any, **options: Any) -> Any:
        return await spill_after(await read_slice(*args, **options), "strings")

    monkeypatch.setattr(redis, "xrange", read_log)
    monkeypatch.setattr(committed, "read_slice", read_strings)
    assert ids(await read_one(redis)) == [1, 2, 3]


async def test_the_log_of_an_ended_request_is_not_read(redis: Redis) -> None:
    await start_worker(redis, "w1")
    await admit(redis, make_request("r1"))
    await place(redis, "r1", "w1")
    await write_log(redis, "w1", make_tokens("r1", 0, [1]))
    await redis.hset(KEYS.request("r1"), "terminal", "length")  # type: ignore[misc]
    assert ids(await read_one(redis)) == []


async def test_a_key_of_another_type_spoils_its_own_request_only(redis: Redis) -> None:
    for request_id in ("spoiled", "good"):
        await admit(redis, make_request(request_id))
    await redis.delete(KEYS.request("spoiled"))
    await redis.set(KEYS.request("spoiled"), "x")
    await redis.rpush(KEYS.tokens("good"), "x")  # type: ignore[misc]
    states = await read(PoolClient(redis, KEYS), ["spoiled", "good"])
    assert [states[name].known for name in ("spoiled", "good")] == [False, True]
