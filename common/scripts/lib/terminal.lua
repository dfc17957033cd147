-- Set the one terminal of a request, store its result and publish it. True for the first caller only.
local function finish(request, result, tokens, reason, json, ttl_ms, channel, payload)
  if redis.call('TYPE', request).ok ~= 'hash' then return false end
  if redis.call('HEXISTS', request, 'terminal') == 1 then return false end
  redis.call('HSET', request, 'terminal', reason)
  redis.call('PEXPIRE', request, ttl_ms)
  redis.call('SET', result, json, 'PX', ttl_ms)
  redis.call('DEL', tokens)
  if channel ~= '' then redis.call('PUBLISH', channel, payload) end
  return true
end
