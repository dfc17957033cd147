"""Prompts of plain English that no server has seen: they differ from the first words on, so that no prefix
cache helps.
"""

import random

WORDS_PER_TOKEN = 0.8
"""Of the sentences below, with the vocabularies of today; the first answer says how many tokens they really
were.
"""

VERBS = (
    "carried measured described painted repaired followed "
    "questioned gathered counted remembered ignored compared"
).split()
NOUNS = (
    "river engine teacher market garden letter bridge "
    "storm library soldier orchard machine captain village harbour"
).split()
ADJECTIVES = (
    "quiet enormous broken modern distant careful golden "
    "ancient practical nervous bright frozen curious local"
).split()


def prompt(seed: int, num_words: int) -> str:
    """A prompt of so many words, the same for the same seed."""
    draw = random.Random(seed)
    words = ["Story", f"{draw.randrange(10**6)}:"]
    while len(words) < num_words:
        subject, other = draw.choice(ADJECTIVES).capitalize(), draw.choice(ADJECTIVES)
        words += [
            subject,
            f"{draw.choice(NOUNS)}s",
            draw.choice(VERBS),
            "the",
            other,
            f"{draw.choice(NOUNS)}.",
        ]
    return " ".join(words[: max(1, num_words)])
