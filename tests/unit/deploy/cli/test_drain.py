"""`tokenfleet drain`: which worker a word means, and whether it is gone."""

import pytest

from deploy.cli.admin import check_return, choose_worker
from deploy.cli.client import ServerError

WORKERS = ["w0-1f", "w0-2e.2", "w1-3d"]


@pytest.mark.parametrize(("word", "worker"), [("w1", "w1-3d"), ("w0-1f", "w0-1f"), ("w0-2e.2", "w0-2e.2")])
def test_an_id_or_the_only_worker_of_a_name_is_chosen(word: str, worker: str) -> None:
    assert choose_worker(WORKERS, word, "default") == worker


@pytest.mark.parametrize(
    ("word", "problem"),
    [("w2", "there is no worker 'w2'"), ("w0", "2 workers are named 'w0'"), ("w", "there is no worker 'w'")],
)
def test_other_words_are_refused_with_the_workers_there_are(word: str, problem: str) -> None:
    with pytest.raises(ServerError, match=f"^{problem}; those of the pool 'default': w0-1f, w0-2e.2"):
        choose_worker(WORKERS, word, "default")
    with pytest.raises(ServerError, match=r"those of the pool 'b': none$"):
        choose_worker([], word, "b")


def test_a_worker_that_was_cut_off_and_is_back_is_not_said_to_be_gone() -> None:
    check_return("w0-2e", ["w0-1f", "w1-3d.2"])
    with pytest.raises(
        ServerError, match=r"^w0-2e was cut off, and is back as w0-2e\.2, which is not drained$"
    ):
        check_return("w0-2e", WORKERS)
