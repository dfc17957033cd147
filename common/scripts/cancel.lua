-- Cancel a request: a flag that `publish_plan` checks, and one message to the batcher, which trims what it
-- read. The message is sent even without KEYS[1]: the batcher may know a request that the broker has lost.
-- KEYS request, control   ARGV payload; then the number of the reader that is gone, 0 for the first; nothing
-- for a cancel whoever reads
-- Returns 1, or 0 when the request is not known, has its terminal or has another reader.
local known = redis.call('TYPE', KEYS[1]).ok == 'hash'
if known and redis.call('HEXISTS', KEYS[1], 'terminal') == 1 then return 0 end
if known and ARGV[2] and (redis.call('HGET', KEYS[1], 'reader') or '0') ~= ARGV[2] then return 0 end
if known and redis.call('HSET', KEYS[1], 'cancel', 1) == 0 then return 1 end
redis.call('XADD', KEYS[2], '*', 'cancel', ARGV[1])
return known and 1 or 0
