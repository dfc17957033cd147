-- Note a stored response, and take the oldest out of the note while there are too many.
-- KEYS responses
-- ARGV request_id, ttl_s, max_kept
-- Returns the ids of those that are to be deleted.
local time = redis.call('TIME')
local now_s = time[1] + time[2] / 1e6
redis.call('ZREMRANGEBYSCORE', responses, '-inf', now_s)
redis.call('ZADD', responses, now_s + tonumber(ttl_s), request_id)
redis.call('EXPIRE', responses, ttl_s)
local surplus = redis.call('ZCARD', responses) - tonumber(max_kept)
if surplus <= 0 then return {} end
local oldest = redis.call('ZRANGE', responses, 0, surplus - 1)
redis.call('ZREMRANGEBYRANK', responses, 0, surplus - 1)
return oldest
