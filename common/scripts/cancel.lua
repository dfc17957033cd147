-- Cancel a request: a flag that `publish_plan` checks, and one message to the batcher, which trims what it
-- read. The message is sent even without `request`: the batcher may know a request that the broker has lost.
-- KEYS request, control
-- ARGV payload, reader
-- `reader`: the number of the reader that is gone, 0 for the first, or '' for a cancel whoever reads.
-- Returns 1, or 0 when the request is not known, has its terminal or has another reader.
local known = redis.call('TYPE', request).ok == 'hash'
if known and redis.call('HEXISTS', request, 'terminal') == 1 then return 0 end
if known and reader ~= '' and (redis.call('HGET', request, 'reader') or '0') ~= reader then return 0 end
if known and redis.call('HSET', request, 'cancel', 1) == 0 then return 1 end
redis.call('XADD', control, '*', 'cancel', payload)
return known and 1 or 0
