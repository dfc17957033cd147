-- needs: lib/now, lib/sealed
-- Heartbeat of a worker. The batcher is notified of its first, and when it begins to drain.
-- KEYS worker, workers, log, reports, plans, control
-- ARGV incarnation, ttl_ms, streams_ttl_ms, state, step, capacity, ...
-- More arguments: field, value of the hash.
-- Returns 'OK', or 'DRAIN' once it was asked to leave, or 'SEALED' or 'MISSING': then it is a worker no more.
local refusal = sealed_or_missing(log)
if refusal then return refusal end
local is_draining = state == 'draining' and redis.call('HGET', worker, 'state') ~= 'draining'
redis.call('HSET', worker, 'state', state, 'step', step, 'capacity', capacity, unpack(ARGV, first_arg))
redis.call('PEXPIRE', worker, ttl_ms)
local is_new = redis.call('ZADD', workers, now_ms(), incarnation) == 1
if is_new or is_draining then redis.call('XADD', control, '*', 'worker_ready', incarnation) end
for _, key in ipairs({workers, log, reports, plans}) do redis.call('PEXPIRE', key, streams_ttl_ms) end
return redis.call('HEXISTS', worker, 'drain') == 1 and 'DRAIN' or 'OK'
