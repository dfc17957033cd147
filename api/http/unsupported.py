"""Fields that nothing would come of are refused by name."""

from collections.abc import Collection, Mapping

from api.errors import invalid

UnsupportedFields = Mapping[str, Collection[object]]
"""Fields that an API knows and we do not serve: the values, besides null, that change nothing."""


def reject_unsupported(
    given: Mapping[str, object], unserved: UnsupportedFields, elsewhere: Collection[str]
) -> None:
    """Raises ApiError (422) for what is unserved, and for what only routes elsewhere have; names that nobody
    knows are ignored.
    """
    for name, value in given.items():
        if value is None or value in unserved.get(name, ()):
            continue
        if name in unserved:
            raise invalid(f"`{name}` is not supported yet", name)
        if name in elsewhere:
            raise invalid(f"`{name}` is no field of this route", name)
