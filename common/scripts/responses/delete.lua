-- Delete a stored response that has ended.
-- KEYS request, tokens, responses   ARGV request id
-- Returns 1, or 0 when it has not ended yet.
if redis.call('TYPE', KEYS[1]).ok == 'hash' and redis.call('HEXISTS', KEYS[1], 'terminal') == 0 then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
