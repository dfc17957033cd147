"""The dashboard of deploy/grafana: its queries, as Grafana sends them for one service and all pools."""

import json
from pathlib import Path

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "dashboards" / "tokenfleet.json"


def panel_queries(window: str) -> list[str]:
    """Of every panel; `window` is what rates look back on."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    variables = {"$service": "tokenfleet", "$pool": ".*", "$__rate_interval": window}
    return [fill(target["expr"], variables) for panel in panels for target in panel.get("targets", [])]


def fill(query: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query
