"""The dashboard of deploy/grafana: its queries, as Grafana sends them for one service and one pool."""

import json
import re
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "dashboards" / "tokenfleet.json"
VARIABLES = {"$service": "tokenfleet", "$pool": "default"}


def panel_queries(window: str) -> list[str]:
    """Return the queries of all panels; `window` is the range of their rates."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    variables = VARIABLES | {"$__rate_interval": window}
    return [fill(target["expr"], variables) for panel in panels for target in panel.get("targets", [])]


def variable_choices() -> list[tuple[str, str, str]]:
    """Return for each variable its value, and the series and label that it is chosen from."""
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    return [choice(one) for one in variables if one["type"] == "query"]


def choice(variable: dict[str, Any]) -> tuple[str, str, str]:
    [(series, label)] = re.findall(r"label_values\((.*), (\w+)\)", fill(variable["definition"], VARIABLES))
    return VARIABLES["$" + variable["name"]], series, label


def fill(query: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query
