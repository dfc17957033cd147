--- change_adapters
-- Change the registry of a pool's adapters if it is as the caller has read it, and give it a new version:
-- gateways, batchers and workers read it again.
-- KEYS adapters
-- ARGV version, ttl_ms, num_removed, ...
-- `version`: '' where there is no registry. More arguments: fields that are removed; then name, value of
-- those that are set.
-- Returns 1, or 0 when somebody else has changed it.
if (redis.call('HGET', adapters, 'version') or '') ~= version then return 0 end
local first_set = first_arg + tonumber(num_removed)
for i = first_arg, first_set - 1 do redis.call('HDEL', adapters, ARGV[i]) end
for i = first_set, #ARGV, 2 do redis.call('HSET', adapters, ARGV[i], ARGV[i + 1]) end
local time = redis.call('TIME')
redis.call('HSET', adapters, 'version', time[1] .. '.' .. time[2])
redis.call('PEXPIRE', adapters, ttl_ms)
return 1
