"""Settings: flags, variables, defaults; models, adapters, speculation; what is refused is named."""

from pathlib import Path

import pytest

from common.settings.flags import flag_parser, help_texts
from common.settings.settings import SettingError, Settings
from common.settings.speculation import FIELDS
from common.settings.types import AdapterSource

# --- settings -----------------------------------------------------------------------------------------------


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    environ = {"PORT": "4000", "NUM_WORKERS": "3", "REDIS_URL": ""}
    settings = Settings.read(["--port", "5000"], environ)
    assert (settings.port, settings.num_workers, settings.num_gateways, settings.redis_url) == (
        5000,
        3,
        1,
        None,
    )


@pytest.mark.parametrize("place", [0, 2, 5])
def test_the_model_is_a_word_at_any_place(place: int, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model-id: other\nnum-workers: 3")
    words = ["--port", "80", "--sharded=false", "--config", str(file)]
    settings = Settings.read([*words[:place], "org/model", *words[place:]])
    assert (settings.model_id, settings.port, settings.num_workers) == ("org/model", 80, 3)


@pytest.mark.parametrize(
    ("text", "number"),
    [("512MiB", 2**29), ("1GiB", 2**30), ("2gb", 2 * 10**9), ("1.5 KiB", 1536), ("1_000", 1000), ("7", 7)],
)
def test_sizes_may_have_units(text: str, number: int) -> None:
    assert Settings.read([], {"KV_CACHE_BYTES": text}).kv_cache_bytes == number


@pytest.mark.parametrize(
    ("argv", "expected"), [(["--debug-kv"], True), (["--debug-kv", "off"], False), ([], False)]
)
def test_a_switch_stands_alone_or_has_a_value(argv: list[str], expected: bool) -> None:
    assert Settings.read(argv, {}).debug_kv is expected


WEIGHT = "is not a tenant and a weight of 0.01 to 1000, as alice=4"


@pytest.mark.parametrize(
    ("argv", "environ", "line"),
    [
        (["--port", "abc"], {}, "PORT: 'abc' is not a whole number"),
        (
            [],
            {"KV_CACHE_BYTES": "3X"},
            "KV_CACHE_BYTES: '3X' is not a whole number; units are as in 4k or 64MiB",
        ),
        (
            ["--max-input-tokens", "100", "--max-total-tokens", "100"],
            {},
            "MAX_INPUT_TOKENS: 100 is not less than MAX_TOTAL_TOKENS (100), which counts new tokens, too",
        ),
        (
            ["--max-input-tokens", "9", "--max-batch-total-tokens", "9"],
            {},
            "MAX_INPUT_TOKENS: 9 is not less than MAX_BATCH_TOTAL_TOKENS (9), which counts new tokens, too",
        ),
        ([], {"DEBUG_KV": "perhaps"}, "DEBUG_KV: 'perhaps' is not true or false"),
        ([], {"REQUEST_TIMEOUT_S": "nan"}, "REQUEST_TIMEOUT_S: 'nan' is not a number"),
        (["--dtype", "int3"], {}, "DTYPE: 'int3' is not one of auto, float32, float16, bfloat16"),
        (
            [],
            {"COMPUTE_TYPE": "a\r\nb: c"},
            "COMPUTE_TYPE: cannot be sent as a header: it must be printable ASCII",
        ),
        *[
            ([], {"TENANT_WEIGHTS": f"bob=2,{word}"}, f"TENANT_WEIGHTS: {word!r} {WEIGHT}")
            for word in ("alice", "alice=0", "=2", "alice=1e9")
        ],
        (
            ["--port", "80", "org/model", "other"],
            {},
            "ARGUMENTS: 'other' is not expected; the model is 'org/model'",
        ),
        (
            ["org/model", "--model", "other"],
            {},
            "ARGUMENTS: 'org/model' and --model both name a model",
        ),
        (["--port"], {}, "--port: expected one argument"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(argv: list[str], environ: dict[str, str], line: str) -> None:
    with pytest.raises(SettingError) as refusal:
        Settings.read(argv, environ)
    assert str(refusal.value) == line


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("PORT", "0", "less than 1"),
        ("PORT", "70000", "more than 65535"),
        ("MAX_STOP_SEQUENCES", "-1", "less than 0"),
        ("REQUEST_TIMEOUT_S", "inf", "more than 604800"),
        ("MAX_TOTAL_TOKENS", "1", "less than 2"),
        ("MAX_BATCH_SIZE", "1" + 18 * "0", "more than 9007199254740992"),
        ("CUDA_MEMORY_FRACTION", "1.5", "more than 1"),
        ("KV_CACHE_BYTES", "0", "less than 1"),
        ("WORKER_TTL_S", "0.9", "less than twice HEARTBEAT_S (0.5)"),
    ],
)
def test_what_is_out_of_range_is_refused_with_the_limit(name: str, text: str, limit: str) -> None:
    with pytest.raises(SettingError) as refusal:
        Settings.read([], {name: text})
    assert str(refusal.value) == f"{name}: {text} is {limit}"


@pytest.mark.parametrize(
    ("hostname", "host"),
    [("0.0.0.0", "0.0.0.0"), ("::1", "::1"), ("localhost", "127.0.0.1"), ("3f2a90c1b7de", "0.0.0.0")],
)
def test_a_machines_name_listens_everywhere(hostname: str, host: str) -> None:
    assert Settings(hostname=hostname).listen_host == host


def test_environ_gives_a_child_the_same_settings() -> None:
    flags = [
        "--debug-kv",
        "--threads",
        "2",
        "--redis-url",
        "redis://h",
        "--request-timeout-s",
        "1.5",
        "--cors-allow-origin",
        "a, b",
    ]
    settings = Settings.read(flags, {})
    assert settings.cors_allow_origin == ("a", "b")
    assert Settings.read([], settings.environ()) == settings


def test_every_setting_has_a_flag_and_a_help_text() -> None:
    text = flag_parser("tokenfleet", everything=True).format_help()
    texts = help_texts()
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')} " in text
        assert texts[name]


@pytest.mark.parametrize("key", ["sésame", "two\nlines", "a\ttab"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(SettingError) as refused:
        Settings.read([], {"API_KEY": key})
    assert str(refused.value).startswith("API_KEY: cannot be sent as a header: it must be printable ASCII")
    assert key.strip() not in str(refused.value)


# --- ranges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"'{' is not JSON"),
        ("[]", r"\[\] must be an object with some of temperature"),
        ('{"eos_token_id": 1}', ".* must be an object with some of temperature"),
        (
            '{"max_new_tokens": 0}',
            "max_new_tokens in the object must be a whole number, at least 1",
        ),
        ('{"temperature": NaN}', "temperature in the object must be a number, at least 0 and at most 100"),
    ],
)
def test_what_cannot_replace_a_default_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingError, match=f"^OVERRIDE_GENERATION_CONFIG: {words}"):
        Settings.read(["--override-generation-config", text], {})


# --- settings models ----------------------------------------------------------------------------------------


def read(*words: str) -> Settings:
    return Settings.read(words, {})


def test_models_are_pools_by_their_names() -> None:
    settings = read("--models", "Qwen/Qwen3-0.6B", "small=/models/tiny", "/models/x.gguf")
    assert settings.model_id == "Qwen/Qwen3-0.6B"
    assert settings.pools == ("default", "small", "x")
    assert settings.other_models == {"small": "/models/tiny", "x": "/models/x.gguf"}
    assert settings.scale_to_zero


def test_a_name_of_the_first_model_is_one_that_requests_may_use() -> None:
    assert read("--models", "fast=smollm2", "b=x/z").served_model_name == ("fast",)


def test_another_model_has_its_own_settings() -> None:
    """What belongs to MODEL_ID does not reach it, in a child process either."""
    settings = read("--models", "smollm2", "b=x/z", "--max-total-tokens", "512", "--num-workers", "2")
    other = settings.of_pool("b")
    assert (other.pool, other.model_id, other.served_model_name) == ("b", "x/z", ("b",))
    assert other.max_total_tokens is None and other.models == () and other.num_workers == 2
    assert Settings.read([], settings.environ() | other.environ()) == other
    assert settings.of_pool("default") is settings


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("a=x/y", "b=x/z", "b=x/w"), "MODELS: 'b' is the name of two models: give one another name"),
        (("smollm2", "default=x/z"), "MODELS: 'default' is the name of two models"),
        (("smollm2", "b="), "MODELS: 'b=' is not a model, or a name and a model"),
        (("smollm2", "b{}=x"), "MODELS: 'b{}=x' is not a model"),
        (("smollm2", "b=x", "--nnodes", "2"), "MODELS: a worker on several machines (NNODES 2) serves one"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(SettingError) as error:
        read("--models", *words)
    assert str(error.value).startswith(line)


# --- lora ---------------------------------------------------------------------------------------------------

SQL, HUB = AdapterSource("sql", "/adapters/sql"), AdapterSource("org/legal", "org/legal@main")


@pytest.mark.parametrize(
    "words",
    [
        ["--lora-adapters", "sql=/adapters/sql,org/legal@main"],
        ["--lora-modules", "sql=/adapters/sql", "org/legal@main"],
        [
            "--lora-modules",
            '{"name": "sql", "path": "/adapters/sql", "base_model_name": "m"}',
            '{"name": "org/legal", "path": "org/legal@main"}',
        ],
    ],
)
def test_adapters_are_named_as_in_tgi_and_in_vllm(words: list[str]) -> None:
    settings = Settings.read(words, {})
    assert settings.adapters == [SQL, HUB]
    assert Settings.read([], settings.environ()).adapters == [SQL, HUB], "and so by child processes"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b=/x", "'a b=/x' is not an adapter, as sql=/adapters/sql"),
        ("sql=", "'sql=' is not an adapter"),
        ("org/a@", "'org/a@' has no revision after the @"),
        ("a@b@c", "'a@b@c' has no revision after the @"),
        ("a=/x,a=/y", "'a' is the name of two adapters"),
    ],
)
def test_a_text_that_is_no_adapter_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingError, match=f"^LORA_ADAPTERS: {words}"):
        Settings.read(["--lora-adapters", text], {})


# --- speculation --------------------------------------------------------------------------------------------


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
    assert values == {name: default for name, (_, default) in FIELDS.items()} | changed


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
        (
            '-sc {"method":"suffix","num_speculative_tokens":16}',
            "must be a whole number, at least 1 and at most 15. Given: 16",
        ),
        (
            '-sc {"method":"suffix","suffix_decoding_min_token_prob":2}',
            "must be a number, at least 0 and at most 1. Given: 2",
        ),
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
