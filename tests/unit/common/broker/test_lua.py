"""Scripts: their names agree with the functions that call them."""

import ast
import re
from collections import Counter

import pytest
from redis.asyncio import Redis

from common.broker.lua import SCRIPTS, call_script, load_script, run_script, script_names
from tests.support.broker_state import KEYS
from tests.support.source_tree import FILES

TEXTS = {
    "lib/double": "local function double(x) return 2 * x end\n",
    "lib/inc": "-- needs: lib/double\nlocal function inc(x) return double(x) / 2 + 1 end\n",
    "sum": """-- needs: lib/double, lib/inc
-- Double, increment and add.
-- KEYS log, ...
-- ARGV left,
--      right, ...
-- Returns the key, the sum, and the first of the others.
return {log, inc(double(left)) + right, KEYS[first_key], ARGV[first_arg]}
""",
}


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in TEXTS.items():
        monkeypatch.setitem(SCRIPTS, name, text)


@pytest.mark.usefixtures("texts")
async def test_a_script_has_what_it_needs_and_its_names_whether_or_not_the_broker_knows_it(
    redis: Redis,
) -> None:
    call = call_script(
        "sum", list, KEYS, "a", args={"right": 1, "left": 20}, more_keys=["b"], more_args=["c"]
    )
    for _ in range(2):
        assert await run_script(redis, call) == [KEYS.log("a").encode(), 42, b"b", b"c"]
        await redis.script_flush()


def called_scripts() -> list[str]:
    """Names of the scripts that functions call."""
    calls = [
        node
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "call_script"
    ]
    return [ast.literal_eval(call.args[0]) for call in calls]


@pytest.mark.parametrize("name", sorted(called_scripts()))
def test_a_script_knows_its_keys_and_arguments_by_name_alone(name: str) -> None:
    keys, args = script_names(name)
    assert max(Counter((*keys.given, *args.given)).values(), default=1) == 1
    assert re.findall(r"(?:KEYS|ARGV)\[\d+\]", SCRIPTS[name]) == []
    assert load_script(name).endswith(SCRIPTS[name])
