"""schemathesis, with its default checks, against an OpenAPI document: what it allows is accepted, what it
forbids is refused, and every response is as described.
"""

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.core.result import Ok
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    negative_data_rejection,
    positive_data_acceptance,
)

from api.http.body import REPLAYED
from api.protocols.table import protocol_at

SETTINGS = settings(
    max_examples=50,  # random ones, in each mode
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
CASES = "hypothesis_explicit_examples"
"""Where hypothesis keeps the cases of a test that are not random; one without any lacks it."""
SHARE = 48
"""Of the cases at the limits of a route's fields, one in this number is tried, unless all are."""
FEW_MODES = [HypothesisTestMode.EXAMPLES, HypothesisTestMode.COVERAGE]
"""To make random cases takes ten times as long as to try them. Routes with a row have their example alone:
test_routes.py and test_requests.py hold them to what is described.
"""
UNKNOWN_HEADER = "x-schemathesis-unknown-property"
UNDESCRIBED = re.compile(
    "Input should be a valid integer"  # JSON Schema takes 5.0 for one
    "|seed`: Input should be|`best_of` must be"
    "|supports up to|must be at most"  # limits of this fleet; and of seeds, 2**64-1 is no float
    "|tokens below|and below"
    "|has no tokens"
    # one field and another
    "|`stream_options` is only allowed with|`top_logprobs` needs|exclude each other|differ|`best_of`"
    "|when tokens are streamed|`max_tokens` must be at least 1. Given: 0"
    "|is only allowed with `tools`|the name .* twice|needs a beam search"
    "|`decoder_input_details` must be false when|has no token that may come before"
    "|each instance has one prediction|`stream` must be false|stands beside `instances`"
    r"|`(messages|system|tools)\[[a-z_.0-9\[\]]*` is required|is for the role `assistant`"
    r"|`(messages|system)\[[a-z_.0-9\[\]]*type` must be one of"
    "|`tool_choice.name` is required|means the same as|`logits_dtype` needs"
    "|does not exist"
    "|can only be used for JSON|white space"
    "|chat_template_kwargs"
    "|list of lists of token ids"  # 5.0 again
    # grammars
    "|cannot be compiled|is not JSON that|(json|value|schema)` must be an object|a text that is not empty"
    "|`(grammar|response_format)[a-z_.]*` is required|`structured_outputs` must have one of"
    "|[Pp]revious response with id|`background` (needs|waits)"
    "|names an answer twice|`to` must not be before|`from` must be within 90 days"
    "|`(detached|resume_s)` needs a stream|`detached` waits for no client"
    "|this model takes text only"
    "|keys for idempotent requests"  # one request and another
    # names that hypothesis takes from our modules for fields that the document does not name
    "|is not supported yet|is not a field of this route"
    # files and batches
    "|`expires_after|`file` must|`metadata` has up to|may keep|`input_file_id` must|there is no |an id of the"
    # vectors and scores
    "|must have at most [0-9]+ tokens|must be a prompt of the model"
    "|must be one text, or as many"
    "|must be a URL that begins with|must be the `cursor` of a page|length mismatch"
)
"""Errors that a JSON schema cannot describe: limits that depend on the fleet or on another field."""


def try_routes(
    document: Any,
    base_url_of: Callable[[str], str],
    thoroughly: bool,
    apart: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """Try each route, by its path at a gateway of a model that it is for, `apart` by its label. Thoroughly is
    with random cases, and all cases at limits.
    """
    schema = schemathesis.openapi.from_dict(document)
    num_cases = Counter[str]()

    def check(case: schemathesis.Case[Any]) -> None:
        num_cases[case.path] += 1
        response = case.call(base_url=base_url_of(case.path), session=session)
        case.validate_response(response, excluded_checks=excluded_checks(case, response))

    with requests.Session() as session:
        session.trust_env = False  # neither proxies nor .netrc are looked for, six files a request
        for found in schema.get_all_operations():
            assert isinstance(found, Ok), found
            operation = found.ok()
            has_row = operation.method == "post" and protocol_at(operation.path) is not None
            modes = list(HypothesisTestMode) if thoroughly else FEW_MODES[: 2 - has_row]
            config = HypothesisTestConfig(schema.config, modes, settings=SETTINGS)
            with apart(operation.label):
                test = create_test(operation=operation, test_func=check, config=config)
                if not thoroughly and (cases := getattr(test, CASES, None)):
                    setattr(test, CASES, cases[::SHARE])
                test()
                assert num_cases[operation.path]


def excluded_checks(case: schemathesis.Case[Any], response: schemathesis.Response) -> list[Any]:
    excluded: list[Any] = []
    if response.status_code in (400, 409, 422) and UNDESCRIBED.search(response.text):
        excluded.append(positive_data_acceptance)
    if case.path == "/chat_tokenize":  # takes a whole chat, as TGI does; checks only what makes the prompt
        excluded.append(negative_data_rejection)
    if case.path == "/v1/files":  # the fields of a form have no types, and an empty list is no field
        excluded.append(negative_data_rejection)
    if REPLAYED in response.headers:  # what another request with this key was answered
        excluded.append(negative_data_rejection)
    # a model may be called x/generate, a job x/cancel and a request streams: other routes show them by GET
    if case.path.startswith(("/v2/models/", "/admin/jobs/", "/requests/streams")):
        excluded.append(allow_header_conformance)
    if UNKNOWN_HEADER in (case.headers or {}):  # headers that a route does not name are none of its business
        excluded.append(negative_data_rejection)
    return excluded
