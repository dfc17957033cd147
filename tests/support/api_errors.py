"""Error objects of the two API families, checked and taken apart."""

import httpx


def tgi_error(response: httpx.Response) -> tuple[int, str]:
    """Return status and `error_type`."""
    answer = response.json()
    assert set(answer) == {"error", "error_type"} and answer["error"]
    return response.status_code, answer["error_type"]


def openai_error(response: httpx.Response) -> tuple[int, str, str | None]:
    """Return status, `type` and `code`."""
    answer = response.json()
    assert (
        set(answer) == {"error"}
        and set(answer["error"]) == {"message", "type", "param", "code"}
        and answer["error"]["message"]
    )
    return response.status_code, answer["error"]["type"], answer["error"]["code"]
