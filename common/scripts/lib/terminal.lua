-- Set the one terminal of a request and publish it: its fields stand in the request's hash, its tokens in the
-- request's string, both for the result's time. True for the first caller only.
-- `records` are those of all tokens, whatever the string has, or '' if none are kept.
local function finish(
  request, tokens, reason, num_tokens, error_text, error_type, records, ttl_ms, channel, payload
)
  if redis.call('TYPE', request).ok ~= 'hash' then return false end
  if redis.call('HEXISTS', request, 'terminal') == 1 then return false end
  redis.call('HSET', request, 'terminal', reason, 'num_tokens', num_tokens)
  if error_text ~= '' then redis.call('HSET', request, 'error', error_text, 'error_type', error_type) end
  redis.call('PEXPIRE', request, ttl_ms)
  if records == '' then redis.call('DEL', tokens) else redis.call('SET', tokens, records, 'PX', ttl_ms) end
  if channel ~= '' then redis.call('PUBLISH', channel, payload) end
  return true
end
