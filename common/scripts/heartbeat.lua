-- Heartbeat of a process that is no worker.
-- KEYS hash of the process, processes   ARGV kind:name, ttl in ms, then field, value of the hash
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_ms - ARGV[2])
redis.call('ZADD', KEYS[2], now_ms, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
