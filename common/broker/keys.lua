--- change_key
-- Write the record of an API key if it is still what the caller has read, and give all of them a new version:
-- gateways read the keys again.
-- KEYS api_keys
-- ARGV key_id, old, new, max_keys, ...
-- `old` is '' for a new key. More arguments: ids of keys that are deleted, as they have counted no more for
-- long.
-- Returns 1, 0 when the record is another one, or -1 when there are `max_keys` already.
if (redis.call('HGET', api_keys, key_id) or '') ~= old then return 0 end
for i = first_arg, #ARGV do redis.call('HDEL', api_keys, ARGV[i]) end
if old == '' and redis.call('HLEN', api_keys) > tonumber(max_keys) then return -1 end
local time = redis.call('TIME')
redis.call('HSET', api_keys, key_id, new, 'version', time[1] .. '.' .. time[2])
return 1
