-- Append token records to the string of a request, from byte `offset` on. Records that are there already are
-- skipped. `width` is the number of records of a token.
-- Returns 1, 0 when it would leave a hole, or -1 when the string has other tokens: what it has is a fact.
local RECORD_SIZE = 8
local ID_SIZE = 4
local function same_ids(one, other, width)
  if one == other then return true end -- as nearly always; a token computed again may have another logprob
  for i = 1, math.min(#one, #other), RECORD_SIZE * width do
    if string.sub(one, i, i + ID_SIZE - 1) ~= string.sub(other, i, i + ID_SIZE - 1) then return false end
  end
  return true
end

local function spill(tokens, offset, records, ttl_ms, width)
  if redis.call('TYPE', tokens).ok ~= 'string' then redis.call('DEL', tokens) end
  local num_present = redis.call('STRLEN', tokens) - offset
  if num_present < 0 then return 0 end
  if num_present > 0 and #records > 0 then
    local present = redis.call('GETRANGE', tokens, offset, offset + math.min(num_present, #records) - 1)
    if not same_ids(present, string.sub(records, 1, #present), width) then return -1 end
  end
  if num_present < #records then
    redis.call('APPEND', tokens, string.sub(records, num_present + 1))
    redis.call('PEXPIRE', tokens, ttl_ms)
  end
  return 1
end
