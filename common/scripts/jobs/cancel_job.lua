-- Cancel a job. One that is not known yet is marked, as its entry may still come.
-- KEYS job   ARGV ttl in ms of the mark of an unknown job
-- Returns as how many requests it was admitted, or -1 when it has ended or the key has another type.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then return -1 end
if redis.call('HEXISTS', KEYS[1], 'last') == 1 then return -1 end
redis.call('HSET', KEYS[1], 'cancel', 1)
if kind == 'none' then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return tonumber(redis.call('HGET', KEYS[1], 'choices') or '0')
