import pytest

from deploy.launcher.supervised_process import Restarts, describe


def test_the_first_restart_is_immediate_and_the_next_ones_wait_longer() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(lived_s=0.0) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 10, 10]


def test_the_pause_counts_from_the_last_start() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(lived_s=3.0) for _ in range(6)] == [0, 0, 0, 0, 1, 5]


def test_a_long_life_resets_the_pause() -> None:
    restarts = Restarts()
    for _ in range(6):
        restarts.pause_s(lived_s=0.0)
    assert restarts.pause_s(lived_s=60.0) == 0
    assert [restarts.pause_s(lived_s=0.0) for _ in range(3)] == [0, 0.5, 1]


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (78, "exit code 78, for the setting named above"),
        (-9, "killed by SIGKILL"),
        (-64, "killed by SIGRTMAX"),
    ],
)
def test_return_codes_are_described_in_words(returncode: int, words: str) -> None:
    assert describe(returncode) == words
