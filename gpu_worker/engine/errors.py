"""The engine's own exceptions. Settings that cannot be served raise SettingError (common/settings)."""


class PeerClosed(Exception):
    """The agent closed the socket; or, on ranks above 0, rank 0 is gone."""


class UnservableModel(Exception):
    """The model needs something that the engine does not have. The message says what."""
