"""Bodies, keys of idempotency and files of API keys: an error names the field."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from api.errors import ApiError
from api.http.auth import read_key_file
from api.http.body import parse_body
from api.protocols.openai_bodies import ChatRequest
from api.protocols.responses import ResponsesRequest
from api.protocols.tgi import GenerateRequest
from common.api_keys import digest_of as digest_of_key
from common.settings.settings import SettingError

# --- body ---------------------------------------------------------------------------------------------------

HI = {"role": "user", "content": "Hi"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}
PARTS = "Input should be a string, or a list of parts, each an object with a `type`"
EITHER = "Input should be a string or an object"
ARGUMENTS = "`messages[0].tool_calls[0].function.arguments`"


@pytest.mark.parametrize(
    ("schema", "body", "line"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": 3}]}, f"`messages[0].content`: {PARTS}"),
        (
            ChatRequest,
            {"messages": [HI, {"role": "user", "content": [3]}]},
            f"`messages[1].content`: {PARTS}",
        ),
        (
            ResponsesRequest,
            {"input": "a", "truncation": "auto"},
            "`truncation`: Input should be 'disabled'. Given: 'auto'",
        ),
        (ChatRequest, {"messages": [3]}, "`messages[0]`: Input should be an object"),
        (ChatRequest, {"messages": [CALL]}, f"{ARGUMENTS}: {EITHER}"),
        (ChatRequest, {"messages": [HI], "tool_choice": 3}, f"`tool_choice`: {EITHER}"),
        (
            GenerateRequest,
            {"inputs": "a", "parameters": {"stop": [1]}},
            "`parameters.stop[0]`: Input should be a valid string",
        ),
        (GenerateRequest, [1], "`body`: Input should be an object"),
    ],
)
def test_a_field_of_a_wrong_type_is_named_once(schema: type[BaseModel], body: Any, line: str) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_body(schema, json.dumps(body).encode())
    assert refusal.value.text.removeprefix("Input validation error: ") == line
    assert refusal.value.param == line.split("`")[1]


# --- key file -----------------------------------------------------------------------------------------------

KEY = "k" * 32
GOOD = f"- key_id: one\n  digest: {digest_of_key(KEY)}\n"


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
    digest: {digest_of_key("z")}
    expires_at: 2027-01-31T12:00:00+01:00
"""
    reports, other = read_key_file(write(tmp_path, text))
    assert (reports.digest, reports.tenant, reports.weight) == (digest_of_key(KEY), "acme", 2.0)
    assert (reports.models, reports.adapters) == (["smollm2"], ["legal"])
    assert (reports.expires_at, other.expires_at) == (1801353600, 1801393200)
    assert (other.tenant, other.admin, other.max_concurrent) == ("other", False, 0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("keys: [", "is not YAML: while parsing"),
        ("", "`body`: Input should be"),
        (f"keys:\n{GOOD}\n  rpm: 2\n", "`keys[0].rpm`: Extra inputs are not permitted"),
        (f"keys:\n{GOOD}  weight: 0\n", "`keys[0].weight`: Input should be greater than"),
        (f"keys:\n{GOOD}  max_concurrent: many\n", "`keys[0].max_concurrent`: Input should be a"),
        (f"keys:\n{GOOD}  expires_at: soon\n", "`keys[0].expires_at`: must be a date"),
        ("keys:\n- key_id: one\n", "`keys[0]`: give either `key` or `digest`"),
        (f"keys:\n{GOOD}- key_id: one\n  key: {'z' * 16}\n", "`keys[1].key_id`: 'one' is the name"),
        (f"keys:\n{GOOD}- key_id: two\n  key: {KEY}\n", "`keys[1]`: another entry has the same key"),
        (f"keys:\n{GOOD}- key_id: api_key\n  key: {'z' * 16}\n", "`keys[1].key_id`: 'api_key' is the name"),
    ],
)
def test_an_error_names_its_place(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(SettingError) as error:
        read_key_file(write(tmp_path, text))
    assert why in str(error.value) and KEY not in str(error.value)
