import pytest
from starlette.requests import Request

from api.errors import ApiError
from api.http.idempotency import digest_of, idempotency_key


def request_with(*values: str) -> Request:
    headers = [(b"idempotency-key", value.encode("latin-1")) for value in values]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers})


def test_spaces_and_the_order_of_fields_do_not_count() -> None:
    digest = digest_of("/", b'{"a": 1, "b": [1, 2]}')
    assert digest == digest_of("/", b'{"b":[1,2],"a":1}')
    others = [b'{"a": 1, "b": [2, 1]}', b'{"a": true, "b": [1, 2]}', b'{"a": "1", "b": [1, 2]}', b"no json"]
    assert (
        len({digest, digest_of("/generate", b'{"a": 1, "b": [1, 2]}'), *(digest_of("/", x) for x in others)})
        == 6
    )


@pytest.mark.parametrize("given", ["key", '"key"', " key "])
def test_quotes_of_a_key_do_not_count(given: str) -> None:
    assert idempotency_key(request_with(given)) == "key"
    assert idempotency_key(request_with()) == ""


@pytest.mark.parametrize("given", ["", '""', "a b", "x" * 256, "schl\xfcssel"])
def test_a_key_that_cannot_be_used_is_refused_by_name(given: str) -> None:
    with pytest.raises(ApiError, match=r"idempotency-key.*1 to 255") as refused:
        idempotency_key(request_with(given))
    assert refused.value.status == 400
