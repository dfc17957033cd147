"""The bodies of TGI's frames, of a stream that no gateway serves."""

from api.streams.describe_answer import describe_answer
from api.streams.stream import Stream
from api.tgi.render import StreamBodies
from common.messages.answer import Rendering, ResumeTerms


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
