"""Prices of models: what a token of the prompt, one of it that was cached, and one of an answer costs.

They are whole numbers of billionths of the currency's unit, so that sums are exact: a price of 0.15 for a
million tokens is 150 for one.
"""

import functools
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

MAX_PRICE = 1_000_000
"""The most for a million tokens."""
BILLION = 10**9


class Prices(NamedTuple):
    """Prices of one token of a model, in billionths."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


def read_prices(word: str) -> tuple[str, Prices]:
    """A model and its prices, of `smollm2=0.15/0.075/0.6`: those of a million tokens of prompts, of cached
    ones, of answers. With two numbers cached tokens cost what others do. Raises ValueError.
    """
    model, _, texts = word.rpartition("=")
    numbers = [price_of_token(text) for text in texts.split("/")]
    if not model or len(numbers) not in (2, 3):
        raise ValueError(f"{word!r} is no model with two or three prices, as smollm2=0.15/0.075/0.6")
    return model, Prices(numbers[0], numbers[-2], numbers[-1])


def price_of_token(text: str) -> int:
    """Billionths for one token, of the price of a million. Raises ValueError."""
    try:
        price = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is no price") from None
    if not (price.is_finite() and 0 <= price <= MAX_PRICE) or price * 1000 != int(price * 1000):
        raise ValueError(f"{text} is no price of 0 to {MAX_PRICE} with at most three decimals")
    return int(price * 1000)


@functools.cache
def prices_of(words: tuple[str, ...], *models: str) -> Prices:
    """The prices of the first of these models that is in MODEL_PRICES; if none is, a token costs nothing.
    Raises ValueError.
    """
    found = dict(map(read_prices, words))
    return next((found[model] for model in models if model in found), Prices())
