-- The one terminal of a request: true for the first caller only, who thereby stores the result and tells the client.
local function finish(home, result, tokens, reason, json, ttl_ms, channel, payload)
  if redis.call('TYPE', home).ok ~= 'hash' or redis.call('HEXISTS', home, 'terminal') == 1 then return false end
  redis.call('HSET', home, 'terminal', reason)
  redis.call('PEXPIRE', home, ttl_ms)
  redis.call('SET', result, json, 'PX', ttl_ms)
  redis.call('DEL', tokens)
  if channel ~= '' then redis.call('PUBLISH', channel, payload) end
  return true
end
