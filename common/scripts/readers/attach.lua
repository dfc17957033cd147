-- Give all requests of an answer another reader: what its former readers say no longer counts.
-- KEYS ...
-- ARGV gateway, inherited
-- Keys: the request of each choice. `inherited`: '' for a client that came back, or, where a connection is
-- inherited, the number of the reader whose connection it was.
-- Returns {'attached', number of the reader, digest of each request}, {'cancelled'}, {'gone'} when one of
-- them is not known, or {'superseded'} when the client has another connection than the inherited one.
local digests = {}
for i = first_key, #KEYS do
  if redis.call('TYPE', KEYS[i]).ok ~= 'hash' then return {'gone'} end
  local state = redis.call('HMGET', KEYS[i], 'digest', 'cancel', 'terminal')
  if not state[1] then return {'gone'} end
  digests[i] = state[1]
  if state[2] or state[3] == 'cancelled' then return {'cancelled'} end
end
if inherited ~= '' and (redis.call('HGET', KEYS[first_key], 'connection') or '0') ~= inherited then
  return {'superseded'}
end
local reader = redis.call('HINCRBY', KEYS[first_key], 'reader', 1)
if inherited == '' then redis.call('HSET', KEYS[first_key], 'connection', reader) end
for i = first_key, #KEYS do
  redis.call('HSET', KEYS[i], 'reader', reader)
  -- a detached request belongs to no gateway
  if redis.call('HGET', KEYS[i], 'gateway') ~= '' then redis.call('HSET', KEYS[i], 'gateway', gateway) end
end
return {'attached', reader, digests}
