"""The engine's own exceptions, and which of several causes is named. Settings that cannot be served raise
SettingError (common/settings).
"""


class PeerClosed(Exception):
    """The agent closed the socket; or, on ranks above 0, rank 0 is gone."""


class UnservableModel(Exception):
    """The model needs something that the engine does not have. The message says what."""


def first_cause(*causes: tuple[object, str]) -> str:
    """The first cause that applies, of pairs (whether it applies, what it is); empty where none does."""
    return next((cause for applies, cause in causes if applies), "")
