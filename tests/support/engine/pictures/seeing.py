"""An engine of a tiny model that sees, prompts for it, and what `generate` answers to them."""

from pathlib import Path
from typing import Any

from tests.support.engine import tiny_engine
from tests.support.engine.batch_player import Player, player
from tests.support.engine.pictures.models import SeeingModel, SeenPrompt, SettledEngine, picture, save

NEW_TOKENS = 12
SETTINGS = tiny_engine.SETTINGS | {"block_size": 16}


class Seeing:
    """A tiny model, an engine of it, prompts and their answers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.model = save(folder, name)
        self.engine: Any = self.start()
        self.prompts = prompts_of(self.model)
        self.answers = {row: self.model.generate(prompt, NEW_TOKENS) for row, prompt in self.prompts.items()}

    def start(self, **settings: Any) -> SettledEngine:
        """Another engine of the model."""
        return SettledEngine(tiny_engine.engine_of(self.model.folder, **SETTINGS | settings))

    def player(self, prefill_tokens: int = 1000) -> Player:
        return player(self.engine, prefill_tokens)

    def play(self, rows: dict[int, SeenPrompt], prefill_tokens: int = 1000) -> dict[int, list[int]]:
        ids = {row: prompt.ids for row, prompt in rows.items()}
        return tiny_engine.play(
            self.engine, ids, prefill_tokens, new_tokens=NEW_TOKENS, params=self.pictures(rows)
        )

    def check(self) -> None:
        """All prompts have their answers, however they are played."""
        ids = {row: prompt.ids for row, prompt in self.prompts.items()}
        tiny_engine.check_ids(self.engine, self.answers, ids, params=self.pictures(self.prompts))

    def pictures(self, rows: dict[int, SeenPrompt]) -> dict[int, dict[str, Any]]:
        return {row: {"pictures": prompt.pictures} for row, prompt in rows.items()}

    def pictures_after(self, prompt: SeenPrompt, num_cached: int) -> list[tuple[int, int, str, bytes]]:
        """As an agent gives them."""
        after = [one for one in prompt.pictures if one[0] + one[1] > num_cached]
        return prompt.pictures if self.engine.ready.all_pictures else after


def prompts_of(model: SeeingModel) -> dict[int, SeenPrompt]:
    return {
        0: model.prompt([5, 6, 7], picture(1), [8, 9, 10, 11, *range(60, 95)]),
        1: model.prompt([*range(20, 50)]),
        2: model.prompt([12] * 9, picture(2, 64, 30), [13, 14], picture(3, 33, 33), [15]),
        3: model.prompt([4, 3], picture(1), [16, 17, 18]),
    }
