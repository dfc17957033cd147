-- Cancel a job. One that is not known yet is marked, as its entry may still come.
-- KEYS job
-- ARGV mark_ttl_ms
-- Returns as how many requests it was admitted, or -1 when it has ended or the key has another type.
local kind = redis.call('TYPE', job).ok
if kind ~= 'hash' and kind ~= 'none' then return -1 end
if redis.call('HEXISTS', job, 'last') == 1 then return -1 end
redis.call('HSET', job, 'cancel', 1)
if kind == 'none' then redis.call('PEXPIRE', job, mark_ttl_ms) end
return tonumber(redis.call('HGET', job, 'choices') or '0')
