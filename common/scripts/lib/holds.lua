-- Whether a worker's attempt may write for a request: the hash names it, or an earlier one, as a broker does
-- that lost what was written last; then it is named again.
local function holds(request, worker, attempt, base)
  if redis.call('TYPE', request).ok ~= 'hash' then return false end
  local fields = redis.call('HMGET', request, 'worker', 'attempt', 'terminal')
  local named_worker, named_attempt, terminal = unpack(fields)
  if terminal then return false end
  local last_attempt = tonumber(named_attempt or '0')
  if attempt == last_attempt then return named_worker == worker end
  if attempt < last_attempt then return false end
  redis.call('HSET', request, 'worker', worker, 'attempt', attempt, 'base', base)
  return true
end
