-- Appends token records to the string of a request, from byte `offset` on. What stands there already is not written again; a
-- write that would leave a hole is refused.
local function spill(tokens, offset, records, ttl_ms)
  local kind = redis.call('TYPE', tokens).ok
  if kind ~= 'string' and kind ~= 'none' then return false end
  local missing = redis.call('STRLEN', tokens) - offset
  if missing < 0 then return false end
  if missing < #records then
    redis.call('APPEND', tokens, string.sub(records, missing + 1))
    redis.call('PEXPIRE', tokens, ttl_ms)
  end
  return true
end
