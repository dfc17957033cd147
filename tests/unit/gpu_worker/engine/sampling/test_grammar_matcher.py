"""Matchers: whatever text a grammar forces, a row writes just that, by its mask as by what is forced."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from api.grammar.compile import Grammar, compile_unchecked
from common import model_files
from gpu_worker.engine.batch.sampling_state import GrammarMask
from gpu_worker.engine.sampling.grammar import Matchers
from gpu_worker.engine.side_threads import SideThreads
from tests.support.engine import tiny_tokenizers

CHANGED = ["e\u0301", "ﬁ", "\u212b", " ", "🙂", "\x00", "A", '"']
"""Texts that a tokenizer changes, or writes in parts of a character."""
GRAMMARS: Mapping[str, Callable[[str], Grammar]] = {
    "choice": lambda text: Grammar("choice", json.dumps([text]), "f"),
    "regex": lambda text: Grammar("regex", re.escape(text), "f"),
    "value": lambda text: Grammar("json", json.dumps({"enum": [text]}), "f"),
    "one of two": lambda text: Grammar("json", json.dumps({"enum": [text, f"{text}."]}), "f"),
    "key": lambda text: Grammar("json", json.dumps(object_with(text)), "f"),
}


def object_with(key: str) -> object:
    properties = {key: {"const": 1}}
    return {"type": "object", "properties": properties, "required": [key], "additionalProperties": False}


def satisfies(written: str, text: str, kind: str) -> bool:
    """Whether what a row wrote is what its grammar of this kind forces."""
    match kind:
        case "choice" | "regex":
            return written == text
        case "key":
            return bool(json.loads(written) == {text: 1})
        case _:
            return json.loads(written) in (text, f"{text}." if kind == "one of two" else text)


@dataclass(frozen=True)
class Model:
    """A model's vocabulary.

    Attributes:
        added: the texts of its added tokens, special ones among them.
    """

    matchers: Matchers
    added: list[str]

    @classmethod
    def of(cls, directory: Path, end: str) -> "Model":
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        [end_id] = tokenizer.encode(end, add_special_tokens=False).ids[-1:]
        matchers = Matchers(directory, tokenizer.get_vocab_size(), [end_id], True, SideThreads())
        return cls(matchers, [token.content for token in tokenizer.get_added_tokens_decoder().values()])

    def write(self, grammar: Grammar, most: int) -> str:
        """The text of a row that takes `most` forced tokens at a time, up to the first that its mask does not
        allow, as the engine does; else the highest of its mask.
        """
        matcher = self.matchers.start(compile_unchecked(grammar), [])
        ids: list[int] = []
        while not matcher.must_end():
            before = len(ids)
            for token in matcher.forced(most) or self.allowed(matcher)[-1:]:
                if token not in self.allowed(matcher):  # llguidance writes a text's rest in other tokens
                    break
                assert not matcher.accept(token)
                ids.append(token)
            assert len(ids) > before
        return self.matchers.vocabulary.decode_str(ids)

    def allowed(self, matcher: GrammarMask) -> list[int]:
        if matcher.bits is None:
            self.matchers.compute([matcher])
        assert matcher.bits is not None
        found: list[int] = np.flatnonzero(np.unpackbits(matcher.bits.view("u1"), bitorder="little")).tolist()
        return found


@pytest.fixture(scope="module", params=["smollm2", "byte_level", "sentence_piece"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param == "smollm2":
        return Model.of(model_files.resolve("smollm2"), "<|im_end|>")
    directory = tmp_path_factory.mktemp("tokenizer")
    getattr(tiny_tokenizers, request.param)(directory)
    return Model.of(directory, tiny_tokenizers.END)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_the_text_of_each_added_token_can_be_forced(model: Model, kind: str) -> None:
    """Alone or in another text, by what is forced or by its mask."""
    assert len(model.added) > 4
    for place, mark in enumerate((*model.added, *CHANGED)):
        text = (mark, f"a{mark}b", f"é {mark} {mark}")[place % 3]
        assert satisfies(model.write(GRAMMARS[kind](text), 15 * (place % 4 > 0)), text, kind)
