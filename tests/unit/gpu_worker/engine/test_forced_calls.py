"""Forced calls and answers: a tiny model with random weights writes valid ones, in every format."""

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence

import jsonschema
import pytest

from api.answers import harmony
from api.answers.call_formats import CALL_FORMATS
from api.answers.scanner import Tool
from api.grammar.compile import Grammar, compile_unchecked
from api.grammar.force import CallChoice, after_thinking, call_grammar
from common import model_files
from common.messages.request import SamplingParams
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.tool_calls.answers import Reading

VOCAB = 49_152
FIRST_SPECIAL = 3
"""The id of the first special token of the bundled vocabulary that stands for a mark."""
MAX_TOKENS = 160
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Orléans"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "units": {"enum": ["c", "f"]},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["city", "names"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", SCHEMA), Tool("now", {"type": "object", "additionalProperties": False}))
"""No text of their arguments is long: a model without sense ends each before `MAX_TOKENS`."""
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(folder, "Llama", tiny_models.LLAMA | {"vocab_size": VOCAB, "tie_word_embeddings": True})
    shutil.copy(model_files.resolve("smollm2") / "tokenizer.json", folder)
    settings = {"dtype": "float32", "kv_cache_bytes": 2**23, "threads": 1}
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


@pytest.mark.slow
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


def test_a_model_without_sense_writes_a_valid_answer_after_harmonys_analysis(engine: Engine) -> None:
    player = Player(engine, list(range(1, 1 + engine.ready.num_blocks)), until=engine.rows.step)
    form, ids_of = CALL_FORMATS["openai"], special_ids("openai")
    source = after_thinking(
        compile_unchecked(Grammar("json", json.dumps(SCHEMA), "f")), None, "", ids_of, form
    )
    ends = [(ids_of[mark], 12.0) for mark in harmony.ENDS]  # one of them comes after about twenty tokens
    params = [SamplingParams(grammar=source, temperature=1.5, seed=row, logit_bias=ends) for row in range(4)]
    starts = [
        player.start(row, [5 + row, 7], MAX_TOKENS, sampling=sampling) for row, sampling in enumerate(params)
    ]
    written = player.run(starts).values()
    assert {why for why, _ in player.ended.values()} == {"eos_token"}
    answers = [Reading(form).read(text_of(engine, ids[:-1], ids_of)) for ids in written]
    assert any(answer.reasoning for answer in answers)
    for answer in answers:
        jsonschema.validate(json.loads(answer.content), SCHEMA)
