"""Rows with a grammar draft what it allows, after what it forces: no id differs from the plain way."""

import json
from pathlib import Path
from typing import Any

import pytest

from api.grammar.compile import Grammar, compile_unchecked
from common.messages.request import SamplingParams
from common.settings.settings import SettingError
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.speculation.drafts import Drafted, drafting_engine, play_rows

WORDS = compile_unchecked(Grammar("regex", r'\{"name": "[a-z ]{60,90}"\}', "f"))
HOT = SamplingParams(temperature=1.3, seed=5, grammar=WORDS)
ROWS: dict[int, SamplingParams | None] = {0: SamplingParams(grammar=WORDS), 1: HOT, 2: HOT, 3: None}


def played(engine: Engine, **run: Any) -> Drafted:
    engine.matchers.waits = True
    return play_rows(engine, rows=ROWS, lead=64, **run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = tiny_models.LLAMA | {"vocab_size": 49_152, "eos_token_id": 2, "tie_word_embeddings": True}
    return tiny_models.save_with_tokenizer(tmp_path_factory.mktemp("model"), "Llama", sizes)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Drafted:
    engine = drafting_engine(folder, None)
    engine.rows.make_proposer = None
    return played(engine)


@pytest.mark.parametrize(
    ("config", "is_right"),
    [
        ({"model": ""}, True),
        pytest.param({"method": "ngram"}, False, marks=pytest.mark.slow),
        pytest.param({"method": "suffix"}, False, marks=pytest.mark.slow),
    ],
)
def test_ids_are_those_of_the_plain_way(
    folder: Path, plain: Drafted, config: dict[str, Any], is_right: bool
) -> None:
    """An equal model is nearly always right: its drafts are masked, too. Guesses are cut."""
    if "model" in config:
        config = {"model": str(folder)}
    engine = drafting_engine(folder, config | {"num_speculative_tokens": 4})
    drafted = played(engine)
    assert drafted.answer == plain.answer
    assert drafted.num_proposed > 0
    if is_right:
        assert drafted.share_right > 0.95
        assert drafted.num_steps < plain.num_steps / 2
    shown = {row: ids[: 7 + row] for row, ids in plain.ids.items()}
    resumed = played(engine, shown=shown).ids
    assert {row: shown[row] + ids for row, ids in resumed.items()} == plain.ids


@pytest.mark.slow
def test_the_tokenizer_of_a_draft_is_compared(folder: Path, tmp_path: Path) -> None:
    """Token by token: another tokenizer of the same size is refused with the first token that differs."""
    draft = tmp_path / "draft"
    sizes = tiny_models.LLAMA | {"vocab_size": 49_152, "eos_token_id": 2, "tie_word_embeddings": True}
    tiny_models.save_with_tokenizer(draft, "Llama", sizes | {"num_hidden_layers": 1})
    config = {"model": str(draft), "num_speculative_tokens": 2}
    assert drafting_engine(folder, config).drafter
    values = json.loads((draft / "tokenizer.json").read_text())
    tokens = sorted(values["model"]["vocab"].items(), key=lambda item: item[1])
    (first, number), (second, other) = tokens[1000:1002]
    values["model"]["vocab"] |= {first: other, second: number}
    (draft / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(SettingError, match=f"its vocabulary is another: token {number} is"):
        drafting_engine(folder, config)
