-- Delete a request that was answered, unless it has another reader.
-- KEYS request, tokens
-- ARGV reader
-- `reader`: its number, 0 for the first.
-- Returns 1, or 0 when it has another reader.
if redis.call('TYPE', request).ok == 'hash' and (redis.call('HGET', request, 'reader') or '0') ~= reader then
  return 0
end
redis.call('DEL', request, tokens)
return 1
