"""Prices of models: read exactly, or refused with the reason."""

import pytest

from common.prices import Prices, prices_of, read_prices
from common.settings.settings import SettingError, Settings


@pytest.mark.parametrize(
    ("word", "prices"),
    [
        ("smollm2=0.15/0.075/0.6", Prices(150, 75, 600)),
        ("a=b=1/2", Prices(1000, 1000, 2000)),
        ("org/model:free=0/0/0", Prices()),
        ("m=1000000/0.001/0", Prices(10**9, 1, 0)),
    ],
)
def test_prices_are_whole_billionths_of_a_token(word: str, prices: Prices) -> None:
    assert read_prices(word) == (word.rpartition("=")[0], prices)


@pytest.mark.parametrize(
    "word",
    ["m", "m=1", "m=1/2/3/4", "=1/2", "m=a/1", "m=-1/1", "m=0.0001/1", "m=nan/1", "m=1e7/1", "m=inf/1"],
)
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(SettingError, match="MODEL_PRICES"):
        Settings.read([], {"MODEL_PRICES": word})


def test_a_model_without_a_price_costs_nothing() -> None:
    assert prices_of(("m=1/2",), "other") == Prices()
    assert Settings(model_prices=("m=1/2",), served_model_name=("m", "n")).prices == Prices(1000, 1000, 2000)
