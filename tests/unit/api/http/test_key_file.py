"""API keys in a file: an error names the line and the field."""

from pathlib import Path

import pytest

from api.http.key_ring import read_key_file
from common.api_keys import digest_of
from common.settings.settings import SettingError

KEY = "k" * 32
GOOD = f"- key_id: one\n  digest: {digest_of(KEY)}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(text)
    return path


def test_all_fields_are_read(tmp_path: Path) -> None:
    text = f"""
keys:
  - key_id: reports
    key: {KEY}
    name: nightly reports
    tenant: acme
    service_class: batch
    weight: 2
    max_concurrent: 3
    requests_per_minute: 60
    tokens_per_minute: 1000
    budget_tokens: 5000
    models: [smollm2]
    adapters: [legal]
    expires_at: 2027-01-31
    admin: true
  - key_id: other
    digest: {digest_of("z")}
    expires_at: 2027-01-31T12:00:00+01:00
"""
    reports, other = read_key_file(write(tmp_path, text))
    assert (reports.digest, reports.tenant, reports.weight) == (digest_of(KEY), "acme", 2.0)
    assert (reports.models, reports.adapters) == (["smollm2"], ["legal"])
    assert (reports.expires_at, other.expires_at) == (1801353600, 1801393200)
    assert (other.tenant, other.admin, other.max_concurrent) == ("other", False, 0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("keys: [", "is not YAML: while parsing"),
        ("", "line 1, `the file`: Input should be"),
        (f"keys:\n{GOOD}\n  rpm: 2\n", "line 5, `keys[0].rpm`: Extra inputs are not permitted"),
        (f"keys:\n{GOOD}  weight: 0\n", "line 4, `keys[0].weight`: Input should be greater than"),
        (f"keys:\n{GOOD}  max_concurrent: many\n", "line 4, `keys[0].max_concurrent`: Input should be a"),
        (f"keys:\n{GOOD}  expires_at: soon\n", "line 4, `keys[0].expires_at`: must be a date"),
        ("keys:\n- key_id: one\n", "line 2, `keys[0]`: give either `key` or `digest`"),
        (f"keys:\n{GOOD}- key_id: one\n  key: {'z' * 16}\n", "line 4, `keys[1].key_id`: 'one' is the name"),
        (f"keys:\n{GOOD}- key_id: two\n  key: {KEY}\n", "line 4, `keys[1]`: another entry has the same key"),
        (f"keys:\n{GOOD}- key_id: api_key\n  key: {'z' * 16}\n", "`keys[1].key_id`: 'api_key' is the name"),
    ],
)
def test_an_error_names_its_place(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(SettingError) as error:
        read_key_file(write(tmp_path, text))
    assert why in str(error.value) and KEY not in str(error.value)
