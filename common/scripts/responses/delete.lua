-- Delete a stored response that has ended.
-- KEYS request, tokens, responses
-- ARGV request_id
-- Returns 1, or 0 when it has not ended yet.
if redis.call('TYPE', request).ok == 'hash' and redis.call('HEXISTS', request, 'terminal') == 0 then
  return 0
end
redis.call('DEL', request, tokens)
redis.call('ZREM', responses, request_id)
return 1
