-- Asks for the end of a job; one that is not known yet may still be on its way. KEYS job   ARGV ttl in ms of what is not known
-- Returns how many requests it has been admitted as, or -1 when it has ended or the key is none of ours.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then return -1 end
if redis.call('HEXISTS', KEYS[1], 'last') == 1 then return -1 end
redis.call('HSET', KEYS[1], 'cancel', 1)
if kind == 'none' then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return tonumber(redis.call('HGET', KEYS[1], 'choices') or '0')
