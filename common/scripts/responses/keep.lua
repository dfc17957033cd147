-- Note a stored response, and take the oldest out of the note while there are too many.
-- KEYS responses   ARGV request id, seconds after which it has expired, how many are kept
-- Returns the ids of those that are to be deleted.
local time = redis.call('TIME')
local now_s = time[1] + time[2] / 1e6
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_s)
redis.call('ZADD', KEYS[1], now_s + tonumber(ARGV[2]), ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
local surplus = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[3])
if surplus <= 0 then return {} end
local oldest = redis.call('ZRANGE', KEYS[1], 0, surplus - 1)
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, surplus - 1)
return oldest
