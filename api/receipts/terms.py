"""Receipt terms: what an answer notes at its admission for the receipt that its client asked for."""

import hashlib
from collections.abc import Sequence

from api.errors import invalid
from api.prompts.tokenizer import ModelTokenizer
from common.messages.answer import ReceiptTerms
from common.messages.request import Generate

WITHOUT_RECEIPT = ("/vertex", "/v2/")
"""How the routes begin whose answers have no place for a receipt."""


def receipt_terms(requests: Sequence[Generate], route: str, tokenizer: ModelTokenizer) -> ReceiptTerms | None:
    """The terms of an answer to these requests; None if they ask for no receipt. Raises ApiError (422)."""
    if not any(request.receipt for request in requests):
        return None
    if route.startswith(WITHOUT_RECEIPT):
        raise invalid(f"`receipt` is not served on {route}: its answers have no place for one", "receipt")
    if any(request.beams for request in requests):
        raise invalid("`receipt` is not served with a beam search", "receipt")
    template = tokenizer.chat_template
    return ReceiptTerms(
        tokenizer=tokenizer.digest,
        chat_template=hashlib.sha256(template.source.encode()).hexdigest() if template else "",
    )
