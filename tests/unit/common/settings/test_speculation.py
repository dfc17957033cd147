"""SPECULATE and SPECULATIVE_CONFIG together say how tokens are proposed."""

import pytest

from common.settings.settings import SettingError, Settings
from common.settings.speculation import FIELDS


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("", 0, "")),
        ("--speculate 3", ("ngram", 3, "")),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":5}', ("ngram", 5, "")),
        ('-sc {"model":"[ngram]","num_speculative_tokens":5}', ("ngram", 5, "")),
        ('--speculative-config {"method":"suffix"}', ("suffix", 15, "")),
        ('--speculate 3 --speculative-config {"method":"suffix"}', ("suffix", 3, "")),
        ('--speculative-config {"model":"tiny","num_speculative_tokens":4}', ("", 4, "tiny")),
        ('--speculative-config {"method":"medusa","model":"heads"}', ("medusa", 0, "heads")),
        ("-sc.method suffix --speculative-config.num_speculative_tokens=5", ("suffix", 5, "")),
        ('--speculative-config {"model":"tiny","method":null}', ("", 0, "tiny")),
    ],
)
def test_both_spellings_are_read(words: str, expected: tuple[str, int, str]) -> None:
    found = Settings.read(words.split(), {}).speculation
    assert (found.method, found.num_tokens, found.model) == expected
    assert bool(found) == bool(words)


def test_a_value_of_vllm_replaces_its_default() -> None:
    config = '{"method":"suffix","suffix_decoding_max_tree_depth":9,"suffix_decoding_min_token_prob":0.5}'
    values = Settings.read(["--speculative-config", config], {}).speculation.values
    changed = {"suffix_decoding_max_tree_depth": 9.0, "suffix_decoding_min_token_prob": 0.5}
    assert values == {name: field.default for name, field in FIELDS.items()} | changed


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("--speculative-config {", "'{' is not JSON"),
        ("--speculative-config []", "must be an object with some of method, model"),
        ('--speculative-config {"tokens":3}', "must be an object with some of method, model"),
        ('--speculative-config {"method":"mtp","model":"m"}', "method mtp is not served; these are: ngram"),
        ('--speculative-config {"method":"eagle3"}', "eagle3 needs a model"),
        ('--speculative-config {"method":"ngram","model":"m"}', "ngram has no model"),
        ("--speculative-config {}", "an object without a method needs a model"),
        ('--speculative-config {"method":"ngram"}', "ngram needs num_speculative_tokens, 1 to 15"),
        ('--speculative-config {"model":3}', "model must be a text"),
        ('-sc {"method":"suffix","num_speculative_tokens":16}', "must be a whole number, 1 to 15. Given: 16"),
        ('-sc {"method":"suffix","suffix_decoding_min_token_prob":2}', "must be a number, 0 to 1. Given: 2"),
        ('-sc {"method":"suffix","num_speculative_tokens":true}', "must be a whole number"),
        ('--speculate 3 -sc {"model":"m","num_speculative_tokens":4}', "is 4, and SPECULATE is 3"),
        (
            '-sc {"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":9}',
            "prompt_lookup_min is more than prompt_lookup_max",
        ),
        (
            '-sc {"model":"m"} --pipeline-parallel-size 2',
            "cannot be combined with PIPELINE_PARALLEL_SIZE",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(words: str, cause: str) -> None:
    with pytest.raises(SettingError, match=r"(?i)speculative_config") as error:
        Settings.read(words.split(), {})
    assert cause in str(error.value)
