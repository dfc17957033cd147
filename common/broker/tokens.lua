--- lib/holds
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

--- lib/spill
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

--- lib/terminal
-- needs: lib/webhooks
-- Set the one terminal of a request and publish it: its fields stand in the request's hash, its tokens in the
-- request's string, both for the result's time. True for the first caller only.
-- `records` are those of all tokens, whatever the string has, or '' if none are kept. What it has reserved of
-- the rate of its API key and not used comes back, or becomes a debt. The event of its webhook is due with
-- the terminal.
local function finish(
  webhooks, request, tokens, reason, num_tokens, error_text, error_type, records, ttl_ms, channel, payload
)
  if redis.call('TYPE', request).ok ~= 'hash' then return false end
  if redis.call('HEXISTS', request, 'terminal') == 1 then return false end
  redis.call('HSET', request, 'terminal', reason, 'num_tokens', num_tokens)
  local key, reserved, webhook = unpack(redis.call('HMGET', request, 'key', 'reserved', 'webhook'))
  if reserved then
    redis.call('HDEL', request, 'key', 'reserved')
    if redis.call('HEXISTS', key, 'tokens') == 1 then
      redis.call('HINCRBYFLOAT', key, 'tokens', reserved - num_tokens)
    end
  end
  if error_text ~= '' then redis.call('HSET', request, 'error', error_text, 'error_type', error_type) end
  redis.call('PEXPIRE', request, ttl_ms)
  if records == '' then redis.call('DEL', tokens) else redis.call('SET', tokens, records, 'PX', ttl_ms) end
  if channel ~= '' then redis.call('PUBLISH', channel, payload) end
  if webhook then note_end(webhooks, webhook, reason) end
  return true
end
