"""Response status: how a response that has ended says that it ended, as long as it is kept."""

from api.event_loop import offload
from api.protocols.response_object import ResponseObjectRenderer
from api.requests.pool_registry import PoolRegistry
from api.resume import attach
from api.resume.look_up import ask_broker
from common.broker.client import broker_url


async def ended_status(pools: PoolRegistry, response_id: str) -> str:
    """The status of a response of the gateway's own pool; empty if it is not kept. Raises ApiError (503)."""
    own, request_id = pools.own, response_id.removeprefix("resp_")
    found = await ask_broker(pools, broker_url(own.settings), [own.settings.pool], request_id)
    if found is None or found.answer.response is None:
        return ""
    [stream] = await attach.read_committed(own, found.answer, found.channel)
    if stream.terminal is None:
        return ""
    renderer = ResponseObjectRenderer(found.answer, stream)
    status: str = (await offload(stream.num_records, renderer.render_so_far))["status"]
    return status
