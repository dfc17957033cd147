-- Delete a request that was answered, unless it has another reader.
-- KEYS request, tokens   ARGV number of the reader, 0 for the first
-- Returns 1, or 0 when it has another reader.
if redis.call('TYPE', KEYS[1]).ok == 'hash' and (redis.call('HGET', KEYS[1], 'reader') or '0') ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
