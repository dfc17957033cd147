"""Forced calls and answers: a tiny model with random weights writes valid ones, in every format."""

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jsonschema
import pytest

from api.chat.grammar import either
from api.structured_output.grammar import Grammar, source_of
from api.tool_calls.forcing.grammar import CallChoice, after_thinking, call_grammar
from api.tool_calls.formats.table import CALL_FORMATS
from common import model_files
from common.messages.request import SamplingParams
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.tool_calls.answers import Reading
from tests.support.tool_calls.golden import TOOLS

VOCAB = 49_152
FIRST_SPECIAL = 3
"""The id of the first special token of the bundled vocabulary that stands for a mark."""
MAX_TOKENS = 160
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(folder, "Llama", tiny_models.LLAMA | {"vocab_size": VOCAB, "tie_word_embeddings": True})
    shutil.copy(model_files.resolve("smollm2") / "tokenizer.json", folder)
    settings = {"dtype": "float32", "kv_cache_bytes": 2**23, "threads": 1, "finish_json": True}
    engine = Engine(Settings(model_id=str(folder), **settings))  # type: ignore[arg-type]
    engine.matchers.waits = True
    return engine


def special_ids(name: str) -> Mapping[str, int]:
    """Marks of Harmony are tokens; others are text here."""
    marks = CALL_FORMATS[name].marks if name == "openai" else ()
    return {mark: FIRST_SPECIAL + i for i, mark in enumerate(marks)}


def text_of(engine: Engine, tokens: Sequence[int], special_ids: Mapping[str, int]) -> str:
    marks = {token: mark.encode() for mark, token in special_ids.items()}
    decode = engine.matchers.vocabulary.decode_bytes
    return b"".join(marks.get(token) or decode([token]) for token in tokens).decode(errors="replace")


def test_a_model_without_sense_writes_valid_calls(engine: Engine) -> None:
    player = Player(engine, list(range(1, 1 + engine.ready.num_blocks)), until=engine.rows.step)
    names = [name for name in CALL_FORMATS for _ in range(2)]
    starts = []
    for row, name in enumerate(names):
        choice = CallChoice(is_required=True, is_parallel=False)
        source = asyncio.run(call_grammar(CALL_FORMATS[name], TOOLS, choice, special_ids(name)))
        sampling = SamplingParams(grammar=source, temperature=1.5 * (row % 2), seed=row)
        starts.append(player.start(row, [5 + row, 7], MAX_TOKENS, sampling=sampling))
    ids = player.run(starts)
    assert {row: why for row, (why, _) in player.ended.items()} == dict.fromkeys(ids, "eos_token")
    for row, name in enumerate(names):
        text = text_of(engine, ids[row][:-1], special_ids(name))
        answer = Reading(CALL_FORMATS[name], tools=TOOLS).read(text)
        assert len(answer.calls) == 1 and not answer.content, (name, text)
        [(function, arguments)] = answer.calls
        jsonschema.validate(json.loads(arguments), SCHEMAS[function])


def test_a_model_without_sense_ends_harmonys_analysis_in_time_for_its_answer(engine: Engine) -> None:
    player = Player(engine, list(range(1, 1 + engine.ready.num_blocks)), until=engine.rows.step)
    form, ids_of = CALL_FORMATS["openai"], special_ids("openai")
    schema = {**SCHEMAS["weather"], "required": ["city", "days"]}
    source = after_thinking(source_of(Grammar("json", json.dumps(schema), "f")), None, "", ids_of, form)
    params = [SamplingParams(grammar=source, temperature=1.5 * (row % 2), seed=row) for row in range(4)]
    starts = [
        player.start(row, [5 + row, 7], MAX_TOKENS, sampling=sampling) for row, sampling in enumerate(params)
    ]
    for ids in player.run(starts).values():
        answer = Reading(form).read(text_of(engine, ids[:-1], ids_of))
        jsonschema.validate(json.loads(answer.content), schema)


@pytest.mark.parametrize("has_format", [False, True], ids=["strict", "response_format"])
def test_where_no_call_is_required_none_is_forced_at_the_end_of_harmonys_analysis(
    engine: Engine, has_format: bool
) -> None:
    form, ids_of = CALL_FORMATS["openai"], special_ids("openai")
    tools = [replace(tool, strict=True) for tool in TOOLS]
    source = asyncio.run(call_grammar(form, tools, CallChoice(is_required=has_format), ids_of))
    if has_format:
        value = source_of(Grammar("json", '{"enum": ["yes", "no"]}', "f"))
        source = either(source, after_thinking(value, None, "", ids_of, form))
    words = engine.matchers.vocabulary.tokenize_str
    begin = [ids_of["<|channel|>"], *words("analysis"), ids_of["<|message|>"], *words("We think")]
    player = Player(engine, list(range(1, 1 + engine.ready.num_blocks)), until=engine.rows.step)
    sampling = SamplingParams(grammar=source)
    ids = player.run([player.start(0, [5, 7, *begin], 60, len(begin), sampling=sampling)])[0]
    written = [token for token in begin + ids if token != engine.matchers.vocabulary.eos_token]
    answer = Reading(form, tools=tools).read(text_of(engine, written, ids_of))
    assert not answer.calls and answer.reasoning.startswith("We think")
    if has_format:
        assert answer.content in ('"yes"', '"no"')
    else:
        assert not answer.content and player.ended[0] == ("length", 60)
