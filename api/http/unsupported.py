"""Unsupported fields: refused by name, because a client would take silence for support."""

from collections.abc import Collection, Mapping

from api.errors import invalid

UnsupportedFields = Mapping[str, Collection[object]]
"""Fields that an API has and this server does not support → values (besides null) that are accepted,
because they ask for what happens anyway.
"""


def reject_unsupported(
    fields: Mapping[str, object], unsupported: UnsupportedFields, other_routes: Collection[str]
) -> None:
    """Raises ApiError (422) for unsupported fields, and for fields that only other routes have. Unknown names
    are ignored.
    """
    for name, value in fields.items():
        if value is None or value in unsupported.get(name, ()):
            continue
        if name in unsupported:
            raise invalid(f"`{name}` is not supported yet", name)
        if name in other_routes:
            raise invalid(f"`{name}` is not a field of this route", name)
