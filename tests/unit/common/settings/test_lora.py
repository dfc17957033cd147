"""Adapters in settings, in the spellings of TGI and vLLM."""

import pytest

from common.settings.lora import AdapterSource
from common.settings.settings import SettingError, Settings

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


def test_memory_of_the_host_has_room_for_the_adapters_of_a_step() -> None:
    assert Settings.read(["--max-cpu-loras", "16"], {}).max_cpu_loras == 16
    with pytest.raises(SettingError, match=r"^MAX_CPU_LORAS: 3 is less than MAX_LORAS \(4\)"):
        Settings.read(["--max-cpu-loras", "3", "--max-loras", "4"], {})


def test_vllms_variable_lets_requests_load_adapters() -> None:
    assert Settings.read([], {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}).allow_runtime_lora_updating
    assert Settings.read([], {}).allow_runtime_lora_updating is None
