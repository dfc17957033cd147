import dataclasses

import pytest

from common.settings import SettingError, Settings, flag_parser


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    environ = {"PORT": "4000", "NUM_WORKERS": "3", "REDIS_URL": ""}
    settings = Settings.read(["--port", "5000"], environ)
    assert (settings.port, settings.num_workers, settings.num_gateways, settings.redis_url) == (5000, 3, 1, None)


@pytest.mark.parametrize(
    ("text", "number"), [("512MiB", 2**29), ("1GiB", 2**30), ("2gb", 2 * 10**9), ("1.5 KiB", 1536), ("1_000", 1000), ("7", 7)]
)
def test_sizes(text: str, number: int) -> None:
    assert Settings.read([], {"KV_CACHE_BYTES": text}).kv_cache_bytes == number


@pytest.mark.parametrize(("argv", "expected"), [(["--debug-kv"], True), (["--debug-kv", "off"], False), ([], False)])
def test_booleans(argv: list[str], expected: bool) -> None:
    assert Settings.read(argv, {}).debug_kv is expected


def test_optional_numbers() -> None:
    assert Settings.read(["--threads=2"], {}).threads == 2
    assert Settings.read([], {}).threads is None


@pytest.mark.parametrize(
    ("argv", "environ", "line"),
    [
        (["--prot", "1"], {}, "--prot: unknown flag; the nearest is --port"),
        (["--port", "abc"], {}, "PORT: 'abc' is not a whole number"),
        ([], {"MAX_BATCH_SIZE": "1.5"}, "MAX_BATCH_SIZE: '1.5' is not a whole number"),
        ([], {"DEBUG_KV": "perhaps"}, "DEBUG_KV: 'perhaps' is not true or false"),
        ([], {"HEARTBEAT_S": "soon"}, "HEARTBEAT_S: 'soon' is not a number"),
        ([], {"NUM_WORKERS": "-1"}, "NUM_WORKERS: -1 is negative"),
        (["--dtype", "int3"], {}, "DTYPE: 'int3' is not one of auto, float32, float16, bfloat16"),
        ([], {"LOG_LEVEL": "loud"}, "LOG_LEVEL: 'loud' is not one of debug, info, warning, error"),
        (["stray"], {}, "ARGUMENTS: 'stray' is not expected"),
        (["--port"], {}, "FLAGS: argument --port: expected one argument"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(argv: list[str], environ: dict[str, str], line: str) -> None:
    with pytest.raises(SettingError) as refusal:
        Settings.read(argv, environ)
    assert str(refusal.value) == line


@pytest.mark.parametrize(
    ("hostname", "host"), [("0.0.0.0", "0.0.0.0"), ("::1", "::1"), ("localhost", "127.0.0.1"), ("3f2a90c1b7de", "0.0.0.0")]
)
def test_a_machines_name_listens_everywhere(hostname: str, host: str) -> None:
    assert Settings(hostname=hostname).listen_host == host


def test_environ_gives_a_child_the_same_settings() -> None:
    settings = Settings.read(["--debug-kv", "--threads", "2", "--redis-url", "redis://h", "--request-timeout-s", "1.5"], {})
    assert Settings.read([], settings.environ()) == settings


def test_every_setting_has_a_flag_and_a_help_text() -> None:
    text = flag_parser("tokenfleet").format_help()
    for item in dataclasses.fields(Settings):
        assert f"--{item.name.replace('_', '-')} " in text
        assert item.metadata["help"]
