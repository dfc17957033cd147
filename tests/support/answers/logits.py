"""Logits in responses of the scripted worker."""

import base64
from typing import Any

import numpy as np

from tests.support.fleet.scripted_worker import VOCAB_SIZE


def positions(found: dict[str, Any]) -> list[float]:
    """The positions of the rows in a field; the scripted worker's logits are their position."""
    assert found["dtype"] == "float32" and found["shape"][1] == VOCAB_SIZE
    rows = np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(found["shape"])
    assert (rows == rows[:, :1]).all()
    return [float(row[0]) for row in rows]


def first_part(response: Any) -> dict[str, Any]:
    """The object with the logits: the first choice, or the response."""
    found: dict[str, Any] = response[0] if isinstance(response, list) else response
    return found["choices"][0] if "choices" in found else found
