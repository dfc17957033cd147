-- Append token records to the string of a request, from byte `offset` on. Records that are there already are
-- skipped; a write that would leave a hole is refused.
local function spill(tokens, offset, records, ttl_ms)
  local kind = redis.call('TYPE', tokens).ok
  if kind ~= 'string' and kind ~= 'none' then return false end
  local num_present = redis.call('STRLEN', tokens) - offset
  if num_present < 0 then return false end
  if num_present < #records then
    redis.call('APPEND', tokens, string.sub(records, num_present + 1))
    redis.call('PEXPIRE', tokens, ttl_ms)
  end
  return true
end
