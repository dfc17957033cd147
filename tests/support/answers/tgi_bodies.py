"""The bodies of TGI's frames, of a stream that no gateway serves."""

from api.answers.answer import Rendering, ResumeTerms
from api.protocols.tgi import StreamBodies
from api.streams.describe_answer import describe_answer
from api.streams.stream import Stream


def bodies_of(stream: Stream, with_details: bool = False) -> StreamBodies:
    answer = describe_answer(
        request_id="r",
        route="/generate_stream",
        streamed=True,
        model="m",
        requests=[stream.request],
        prefixes=[""],
        rendering=Rendering(details=with_details),
        terms=ResumeTerms(),
        created_s=0,
    )
    return StreamBodies(answer, stream)
