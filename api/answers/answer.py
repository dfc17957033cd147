"""Answer messages: what the frames of an answer need besides its tokens."""

from dataclasses import dataclass, replace

from common.messages.codec import wire_field
from common.messages.request import Generate


@dataclass(frozen=True, slots=True)
class Reading:
    """How the text of a chat's answer is read: what of it is reasoning, and what are calls of tools.

    Attributes:
        calls, reasoning: names of the formats in which the model writes them; empty for none.
        prompt_end: the end of the prompt, where reasoning may have begun.
        tools: the functions that may be called: the name of each, and the JSON schema of its parameters.
        is_named: the client chose the function.
        parallel: there may be several calls.
        is_older: a call is shown as OpenAI's older `function_call`.
        shows_reasoning: reasoning is part of the answer.
        is_either: the answer is calls, or else all of it has the form that the client asked for.
    """

    calls: str = wire_field("ca", default="")
    reasoning: str = wire_field("re", default="")
    prompt_end: str = wire_field("pe", default="")
    tools: list[tuple[str, str]] = wire_field("to", default_factory=list)
    is_named: bool = wire_field("na", default=False)
    parallel: bool = wire_field("pa", default=True)
    is_older: bool = wire_field("ol", default=False)
    shows_reasoning: bool = wire_field("sr", default=True)
    is_either: bool = wire_field("ei", default=False)


@dataclass(frozen=True, slots=True)
class Rendering:
    """How an answer is rendered.

    Attributes:
        details: TGI's `details`.
        logprobs: OpenAI's `logprobs`.
        usage, running_usage: OpenAI's `stream_options`.
        skip_special: special tokens are left out of the text.
        include_stop: the text has its stop string or stop token.
        prompt_only: choices have no generated text.
        reading: how text is read; None where all of it is content.
        token_ids: vLLM's `return_token_ids`.
        names_by_id: vLLM's `return_tokens_as_token_ids`.
        prompt_tops: vLLM's `prompt_logprobs`: likeliest tokens shown at each place of the prompt.
        is_json: a grammar makes the answer JSON.
    """

    details: bool = wire_field("dt", default=False)
    logprobs: bool = wire_field("lp", default=False)
    usage: bool = wire_field("us", default=False)
    running_usage: bool = wire_field("ru", default=False)
    skip_special: bool = wire_field("sk", default=True)
    include_stop: bool = wire_field("is", default=False)
    prompt_only: bool = wire_field("po", default=False)
    reading: Reading | None = wire_field("rd", default=None)
    token_ids: bool = wire_field("ti", default=False)
    names_by_id: bool = wire_field("ni", default=False)
    prompt_tops: int | None = wire_field("pt", default=None)
    is_json: bool = wire_field("js", default=False)


@dataclass(frozen=True, slots=True)
class AnswerTerms:
    """To whom an answer belongs, and its life in two numbers. The deadline of its requests
    (`Generate.ttl_ms`) is no part of it: it ends what still runs, whoever reads.

    Attributes:
        owner: digest of the API key that its client sent; empty without one.
        body: digest of the route and body of a request that may be repeated, by its `Idempotency-Key`.
        goes_on_s: how long it goes on without a client; infinite up to its deadline. None where the client
            did not ask: it is cancelled at once, or GATEWAY_GRACE_S after the death of its gateway.
        kept_s: how long it is kept after its end, although it was answered; 0 deletes it then.
    """

    owner: str = wire_field("ow", default="")
    body: str = wire_field("bo", default="")
    goes_on_s: float | None = wire_field("go", default=None)
    kept_s: float = wire_field("ke", default=0.0)


@dataclass(frozen=True, slots=True)
class ResponseParts:
    """Parts of an answer that only the Responses API has, as JSON.

    Attributes:
        fields: fields of the response object that are known at admission.
        before: items of the conversation that it continues.
        items: its own input items.
    """

    fields: bytes = wire_field("f")
    before: bytes = wire_field("b")
    items: bytes = wire_field("i")


@dataclass(frozen=True, slots=True)
class InferOutputs:
    """The outputs of an answer of KServe's …/infer.

    Attributes:
        id: the client's own name of the request.
        outputs: (name, whether its one text is written as bytes, shape of its tensor of texts).
    """

    id: str | None = wire_field("i")
    outputs: list[tuple[str, bool, list[int]]] = wire_field("o")


@dataclass(frozen=True, slots=True)
class VectorAnswer:
    """What an answer shows of vectors or scores (api/protocols/pooling.py).

    Attributes:
        form: the shape of its JSON.
        base64: vectors are the base64 of their float32 values.
        dimensions: the first values that are kept of a vector; 0 keeps all.
        normalized: vectors have the length 1.
        num_queries: scores are cosines of vectors, of which this many come first and are compared with the
            others; 0 where the model scores pairs itself.
        raw: scores are as the model computes them.
        top_n: the best that are shown; 0 shows all.
        texts: what is shown beside the scores.
    """

    form: str = wire_field("f")
    base64: bool = wire_field("b", default=False)
    dimensions: int = wire_field("d", default=0)
    normalized: bool = wire_field("n", default=True)
    num_queries: int = wire_field("q", default=0)
    raw: bool = wire_field("r", default=False)
    top_n: int = wire_field("t", default=0)
    texts: list[str] = wire_field("x", default_factory=list)


@dataclass(frozen=True, slots=True)
class AnswerTrace:
    """The first span of an answer's trace, which whoever goes on with the answer ends.

    Attributes:
        root: its name, as `traceparent`.
        parent_id: the client's span, if the client sent one.
        started_ns: Unix time of its start.
    """

    root: str = wire_field("r")
    parent_id: str = wire_field("p")
    started_ns: int = wire_field("s")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """One answer over HTTP: all choices of all prompts, and how they are rendered.

    It is kept with the request of its first choice, so that every gateway can render the answer. All render
    the same bytes, which are a function of this message and of the tokens.

    Attributes:
        request_id: id of the answer. A single choice has the same id; else the n-th has `{id}.{n}`.
        route: path of the route at which it was requested.
        streamed: whether frames were requested, or the whole.
        created_s: Unix time of its admission.
        model, fingerprint: names of the model, and of the version that admitted it.
        n: choices of each prompt.
        prompts: packed ids of each prompt.
        requests: of each choice, without its prompt. A beam search is one request for all its choices.
        prefixes: for each prompt, the text with which its choices begin.
        response: of the Responses API.
        infer: of KServe's …/infer.
        vectors: None for an answer of tokens.
        trace: None where it is not sampled.
        numbered: each frame has its ordinal as id: its client asked to come back, or reads the events of the
            Responses API. Elsewhere frames are those of OpenAI and TGI, many of whose clients know no line
            but `data:`.
        num_chars: characters of all prompts.
    """

    request_id: str = wire_field("id")
    route: str = wire_field("ro")
    streamed: bool = wire_field("st")
    created_s: int = wire_field("cr")
    model: str = wire_field("mo")
    fingerprint: str = wire_field("fp")
    n: int = wire_field("n")
    prompts: list[bytes] = wire_field("pr")
    requests: list[Generate] = wire_field("rq")
    prefixes: list[str] = wire_field("px")
    rendering: Rendering = wire_field("re", default_factory=Rendering)
    terms: AnswerTerms = wire_field("tm", default_factory=AnswerTerms)
    response: ResponseParts | None = wire_field("rp", default=None)
    infer: InferOutputs | None = wire_field("in", default=None)
    trace: AnswerTrace | None = wire_field("tr", default=None)
    vectors: VectorAnswer | None = wire_field("ve", default=None)
    numbered: bool = wire_field("nu", default=False)
    num_chars: int = wire_field("nc", default=0)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(map(len, self.prompts)) // 4

    @property
    def num_per_prompt(self) -> int:
        return len(self.requests) // len(self.prompts)

    def prefix(self, choice: int) -> str:
        """The text with which a choice begins."""
        return self.prefixes[choice // self.n]

    def choices(self) -> list[Generate]:
        """Each request, with its id and its prompt."""
        several = len(self.requests) > 1
        return [
            replace(
                request,
                request_id=f"{self.request_id}.{i}" if several else self.request_id,
                prompt_ids=self.prompts[i // self.num_per_prompt],
            )
            for i, request in enumerate(self.requests)
        ]
