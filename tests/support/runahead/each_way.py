"""The two ways in which an engine's steps are launched. Tests with one of these marks run in the other one
only with the slow tests: fleets on CPU run in turn, and their ids are compared with the same answers.
"""

import pytest

AHEAD = pytest.mark.parametrize(
    "engine", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "ahead"], indirect=True
)
"""A step is launched before the last one is read, as on a device that computes by itself."""
IN_TURN = pytest.mark.parametrize(
    "engine", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "ahead"], indirect=True
)
