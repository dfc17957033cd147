"""`llm`: the command line, with a model of extra-openai-models.yaml, as its documentation shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clients.questions import MODEL, QUESTION, WARM

pytest.importorskip("llm")
pytestmark = pytest.mark.slow
MODELS = """
- {{model_id: fleet, model_name: {model}, api_base: "{url}", supports_schema: true, supports_tools: true}}
- {{model_id: older, model_name: {model}, api_base: "{url}", completion: true}}
"""


@pytest.fixture
def home(url: str, tmp_path: Path) -> Path:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(model=MODEL, url=url))
    return tmp_path


def ask(home: Path, *words: str) -> str:
    own = {"LLM_USER_PATH": str(home), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "llm", *words]
    done = subprocess.run(
        command, env=os.environ | own, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_prompt_is_the_same_streamed_and_whole_and_continued(home: Path) -> None:
    given = ("-m", "fleet", "-o", "temperature", "0", "-o", "max_tokens", "12")
    assert ask(home, *given, QUESTION) == ask(home, *given, "--no-stream", QUESTION) != ""
    assert ask(home, "-c", "-o", "max_tokens", "5", "And one more?")


def test_a_schema_gives_json(home: Path) -> None:
    words = ("-m", "fleet", "-o", "temperature", "0", "-o", "max_tokens", "200", "--schema")
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 120}},
        "required": ["age"],
        "additionalProperties": False,
    }
    assert json.loads(ask(home, *words, json.dumps(schema), "Bob is 32")).keys() == {"age"}


def test_the_completions_route_is_asked(home: Path) -> None:
    assert "Paris" in ask(
        home, "-m", "older", "-o", "max_tokens", "5", "-o", "temperature", "0", "The capital of France is"
    )


def test_a_function_of_ones_own_may_be_called(home: Path) -> None:
    """Whether the model calls it is its own affair; the command comes to its end in both cases."""
    function = "def get_weather(place: str) -> str:\n    'Weather of a place'\n    return '31 degrees'"
    given = ("-m", "fleet", "-o", "temperature", "0", "-o", "max_tokens", "60")
    assert ask(home, *given, "--functions", function, "--chain-limit", "3", WARM) is not None
