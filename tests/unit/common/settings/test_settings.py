import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.settings.flags import flag_parser
from common.settings.help import help_texts
from common.settings.settings import SettingError, Settings
from tests.support.forks.client import ForkedProcess


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


def test_a_number_that_is_not_given_may_be_none() -> None:
    assert Settings.read(["--threads=2"], {}).threads == 2
    assert Settings.read([], {}).threads is None


WEIGHT = "is not a tenant and a weight of 0.01 to 1000, as alice=4"


@pytest.mark.parametrize(
    ("argv", "environ", "line"),
    [
        (["--prot", "1"], {}, "--prot: unknown flag; the nearest is --port"),
        (["--port", "abc"], {}, "PORT: 'abc' is not a whole number"),
        ([], {"MAX_BATCH_SIZE": "1.5"}, "MAX_BATCH_SIZE: '1.5' is not a whole number"),
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
        (
            ["--max-total-tokens", "101", "--max-batch-total-tokens", "100"],
            {},
            "MAX_TOTAL_TOKENS: 101 is more than MAX_BATCH_TOTAL_TOKENS (100) allows",
        ),
        ([], {"DEBUG_KV": "perhaps"}, "DEBUG_KV: 'perhaps' is not true or false"),
        ([], {"HEARTBEAT_S": "soon"}, "HEARTBEAT_S: 'soon' is not a number"),
        ([], {"MAX_BATCH_SIZE": "9" * 400 + ".5"}, f"MAX_BATCH_SIZE: '{'9' * 400}.5' is not a whole number"),
        ([], {"REQUEST_TIMEOUT_S": "nan"}, "REQUEST_TIMEOUT_S: 'nan' is not a number"),
        (["--dtype", "int3"], {}, "DTYPE: 'int3' is not one of auto, float32, float16, bfloat16"),
        ([], {"LOG_LEVEL": "loud"}, "LOG_LEVEL: 'loud' is not one of debug, info, warning, error"),
        (
            [],
            {"COMPUTE_TYPE": "a\r\nb: c"},
            "COMPUTE_TYPE: 'a\\r\\nb: c' cannot be sent as a header: it must be printable ASCII",
        ),
        *[
            ([], {"TENANT_WEIGHTS": f"bob=2,{word}"}, f"TENANT_WEIGHTS: {word!r} {WEIGHT}")
            for word in ("alice", "alice=", "alice=0", "alice=some", "=2", "alice=1e9")
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
        ("GATEWAY_PORT", "65536", "more than 65535"),
        ("PAYLOAD_LIMIT", "0", "less than 1"),
        ("MAX_CONCURRENT_REQUESTS", "0", "less than 1"),
        ("MAX_QUEUED_BYTES", "0", "less than 1"),
        ("MAX_STOP_SEQUENCES", "-1", "less than 0"),
        ("REQUEST_TIMEOUT_S", "0", "less than 0.1"),
        ("REQUEST_TIMEOUT_S", "inf", "more than 604800"),
        ("WORKER_GRACE_S", "-0.5", "less than 0"),
        ("NUM_GATEWAYS", "0", "less than 1"),
        ("NUM_BATCHERS", "0", "less than 1"),
        ("NUM_WORKERS", "1025", "more than 1024"),
        ("MAX_INPUT_TOKENS", "0", "less than 1"),
        ("MAX_TOTAL_TOKENS", "1", "less than 2"),
        ("MAX_BATCH_PREFILL_TOKENS", "0", "less than 1"),
        ("MAX_BATCH_TOTAL_TOKENS", "0", "less than 1"),
        ("MAX_BATCH_SIZE", "0", "less than 1"),
        ("MAX_BATCH_SIZE", "1" + 18 * "0", "more than 9007199254740992"),
        ("HORIZON", "0", "less than 1"),
        ("METRICS_PORT", "65536", "more than 65535"),
        ("CUDA_MEMORY_FRACTION", "0", "less than 0.01"),
        ("CUDA_MEMORY_FRACTION", "1.5", "more than 1"),
        ("ROPE_FACTOR", "0.5", "less than 1"),
        ("NUM_JOBS", "1025", "more than 1024"),
        ("MAX_BEST_OF", "0", "less than 1"),
        ("THREADS", "0", "less than 1"),
        ("KV_CACHE_BYTES", "0", "less than 1"),
        ("BLOCK_SIZE", "0", "less than 1"),
        ("STEP_TIMEOUT_S", "0", "less than 1"),
        ("HEARTBEAT_S", "0", "less than 0.01"),
        ("WORKER_TTL_S", "0.9", "less than twice HEARTBEAT_S (0.5)"),
    ],
)
def test_what_is_out_of_range_is_refused_with_the_limit(name: str, text: str, limit: str) -> None:
    with pytest.raises(SettingError) as refusal:
        Settings.read([], {name: text})
    assert str(refusal.value) == f"{name}: {text} is {limit}"


def test_limits_themselves_are_served() -> None:
    limits = [
        "--port=65535",
        "--gateway-port=0",
        "--horizon=1",
        "--max-total-tokens=2",
        "--worker-grace-s=0",
        "--request-timeout-s=604800",
    ]
    assert Settings.read([*limits, "--worker-ttl-s=2", "--heartbeat-s=1"], {}).horizon == 1


def test_defaults_are_in_range() -> None:
    assert Settings.read([], Settings().environ()) == Settings()


@pytest.mark.parametrize("module", ["api", "batcher", "gpu_worker"])
def test_a_process_that_cannot_serve_a_setting_says_so_in_one_line(module: str) -> None:
    environ = os.environ | {"KV_CACHE_BYTES": "0", "REDIS_URL": "redis://127.0.0.1:1"}
    words = [sys.executable, "-P", "-m", module]
    process = ForkedProcess(words, env=environ, stderr=subprocess.PIPE)
    assert process.communicate() == (None, b"tokenfleet: KV_CACHE_BYTES: 0 is less than 1\n")
    assert process.returncode == os.EX_CONFIG


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


def test_a_child_whose_model_was_found_takes_the_variables_that_named_it() -> None:
    variables = {"MODEL_ID": "org/model", "TOKENIZER_NAME": "org/model"}
    found = Settings.read([], variables).model_copy(update={"model_id": "/cache/model"})
    assert Settings.read([], variables | found.environ()) == found


def test_every_setting_has_a_flag_and_a_help_text() -> None:
    text = flag_parser("tokenfleet", everything=False).format_help()
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
