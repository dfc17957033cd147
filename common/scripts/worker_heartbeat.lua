-- needs: lib/sealed
-- A worker's sign of life. Returns 'OK', or why it is a worker no more.
-- KEYS worker, workers, log, reports, plans, control   ARGV incarnation, ttl in ms, ttl of the streams in ms, state, step, capacity,
--      then field, value of each figure
local refusal = sealed_or_missing(KEYS[3])
if refusal then return refusal end
redis.call('HSET', KEYS[1], 'state', ARGV[4], 'step', ARGV[5], 'capacity', ARGV[6], unpack(ARGV, 7))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local now = redis.call('TIME')
local fresh = redis.call('ZADD', KEYS[2], now[1] * 1000 + math.floor(now[2] / 1000), ARGV[1]) == 1
if fresh or ARGV[4] == 'draining' then redis.call('XADD', KEYS[6], 'MAXLEN', '~', 10000, '*', 'worker_ready', ARGV[1]) end
for i = 2, 5 do redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
return 'OK'
