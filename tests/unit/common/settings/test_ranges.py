import pytest

from common.settings.settings import SettingError, Settings


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


def test_null_replaces_nothing() -> None:
    settings = Settings.read([], {"OVERRIDE_GENERATION_CONFIG": '{"top_k": 5, "top_p": null}'})
    assert settings.sampling_overrides == {"top_k": 5}
