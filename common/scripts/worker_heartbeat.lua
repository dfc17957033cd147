-- needs: lib/now, lib/sealed
-- Heartbeat of a worker. The batcher is notified of its first, and when it begins to drain.
-- KEYS worker, workers, log, reports, plans, control
-- ARGV incarnation, ttl in ms, ttl of the streams in ms, state, step, capacity, then field, value of the hash
-- Returns 'OK', or 'DRAIN' once it was asked to leave, or 'SEALED' or 'MISSING': then it is a worker no more.
local refusal = sealed_or_missing(KEYS[3])
if refusal then return refusal end
local is_draining = ARGV[4] == 'draining' and redis.call('HGET', KEYS[1], 'state') ~= 'draining'
redis.call('HSET', KEYS[1], 'state', ARGV[4], 'step', ARGV[5], 'capacity', ARGV[6], unpack(ARGV, 7))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local is_new = redis.call('ZADD', KEYS[2], now_ms(), ARGV[1]) == 1
if is_new or is_draining then redis.call('XADD', KEYS[6], '*', 'worker_ready', ARGV[1]) end
for i = 2, 5 do redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
return redis.call('HEXISTS', KEYS[1], 'drain') == 1 and 'DRAIN' or 'OK'
