"""Names of the lives of a process."""

from common.process.logs import first_incarnation, new_incarnation, next_incarnation


def test_the_lives_of_a_process_are_numbered_and_no_two_processes_share_a_name() -> None:
    first = new_incarnation("w0")
    assert first != new_incarnation("w0")
    assert next_incarnation(first) == f"{first}.2"
    assert next_incarnation(f"{first}.9") == f"{first}.10"
    assert {first_incarnation(name) for name in (first, f"{first}.2", f"{first}.10")} == {first}
