--- lib/now
-- The present by the broker's clock, in ms.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

--- lib/fenced
-- Whether an epoch newer than `epoch` has begun: a batcher of an earlier epoch may write nothing more.
local function fenced(key, epoch)
  local newest = redis.call('GET', key)
  return newest and tonumber(newest) > tonumber(epoch)
end

--- lib/sealed
-- 'MISSING' or 'SEALED' when nothing can be appended to a log, else false. A key of another type is no log.
local SEAL = '18446744073709551615-18446744073709551615' -- the highest id: every later XADD is refused
local function sealed_or_missing(log)
  if redis.call('TYPE', log).ok ~= 'stream' then return 'MISSING' end
  if #redis.call('XRANGE', log, SEAL, SEAL) == 1 then return 'SEALED' end
  return false
end

--- lib/places
-- needs: lib/now
-- Places of live requests: how many of each class and tenant the stream `requests` has, and what they weigh.
-- The entry of a request says in its field `place` what it takes: class, tokens of the prompt, tenant; in
-- `logits`, if it returns some, the most bytes of them; and in `key`, if it has an API key, the hash of what
-- that key has of its limits, which counts its live requests by pool. So what an entry took comes back when
-- it is deleted, whichever script does it. A sum that does not fit the stream, as after entries of an older
-- version, is counted anew.
local CLASSES = {'interactive', 'standard', 'batch'} -- the most urgent first
local CLASS_INDEX = {}
for index, class in ipairs(CLASSES) do CLASS_INDEX[class] = index end
local KEY_USE_TTL_MS = 7 * 86400000

local function read_place(entry)
  local payload, place, logits, key = '', '', 0, ''
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'place' then place = entry[2][i + 1] end
    if entry[2][i] == 'generate' then payload = entry[2][i + 1] end
    if entry[2][i] == 'logits' then logits = tonumber(entry[2][i + 1]) end
    if entry[2][i] == 'key' then key = entry[2][i + 1] end
  end
  local class, tokens, tenant = string.match(place, '^(%a+) (%d+) (.*)$')
  if not CLASS_INDEX[class] then return 'standard', 0, '', #payload, logits, key end
  return class, tonumber(tokens), tenant, #payload, logits, key
end

-- Have the hash of an API key say how many live requests this pool has of it.
local function show_live(places, key)
  local field, number = 'live:' .. places, redis.call('HGET', places, 'key:' .. key)
  if number then
    redis.call('HSET', key, field, number)
    redis.call('PEXPIRE', key, KEY_USE_TTL_MS)
  else
    redis.call('HDEL', key, field)
  end
end

-- Count `number` requests of a tenant, and what they take together; negative numbers take them away.
local function add_places(places, number, class, tokens, tenant, bytes, logits, key)
  redis.call('HINCRBY', places, 'all', number)
  redis.call('HINCRBY', places, 'requests:' .. class, number)
  redis.call('HINCRBY', places, 'tokens:' .. class, tokens + 0) -- Redis 7.0 takes no -0
  redis.call('HINCRBY', places, 'bytes:' .. class, bytes + 0)
  if logits ~= 0 then redis.call('HINCRBY', places, 'logits', logits) end
  local own = 'tenant:' .. class .. ':' .. tenant
  if redis.call('HINCRBY', places, own, number) <= 0 then redis.call('HDEL', places, own) end
  if key == '' then return end
  local live = 'key:' .. key
  if redis.call('HINCRBY', places, live, number) <= 0 then redis.call('HDEL', places, live) end
  show_live(places, key)
end

local function drop_places(places)
  local keys = {}
  for i, field in ipairs(redis.call('HKEYS', places)) do
    if string.sub(field, 1, 4) == 'key:' then keys[#keys + 1] = string.sub(field, 5) end
  end
  redis.call('DEL', places)
  for _, key in ipairs(keys) do show_live(places, key) end
end

local function count_places(requests, places)
  drop_places(places)
  for _, entry in ipairs(redis.call('XRANGE', requests, '-', '+')) do
    add_places(places, 1, read_place(entry))
  end
end

-- Append the entry of a request. Returns its id.
local function take_place(requests, places, payload, clock, class, tokens, tenant, logits, key)
  local entry = {'generate', payload, 'place', class .. ' ' .. tokens .. ' ' .. tenant}
  if clock then entry[5], entry[6] = 'clock', clock end
  if logits > 0 then entry[#entry + 1], entry[#entry + 2] = 'logits', logits end
  if key ~= '' then entry[#entry + 1], entry[#entry + 2] = 'key', key end
  local id = redis.call('XADD', requests, '*', unpack(entry))
  add_places(places, 1, class, tokens, tenant, #payload, logits, key)
  return id
end

-- Delete entries, and note how long it takes on average until a place is free.
local function return_places(requests, places, ids)
  local number, sums = 0, {}
  for _, id in ipairs(ids) do
    local entry = redis.call('XRANGE', requests, id, id)[1]
    if entry and redis.call('XDEL', requests, id) > 0 then
      local class, tokens, tenant, bytes, logits, key = read_place(entry)
      local own = class .. ' ' .. tenant .. ' ' .. key
      local sum = sums[own] or {0, class, 0, tenant, 0, 0, key}
      sums[own] = {sum[1] - 1, class, sum[3] - tokens, tenant, sum[5] - bytes, sum[6] - logits, key}
      number = number + 1
    end
  end
  if number == 0 then return end
  if redis.call('XLEN', requests) == 0 then
    drop_places(places)
    return
  end
  for _, sum in pairs(sums) do add_places(places, unpack(sum)) end
  local freed_ms = now_ms()
  local last, mean = unpack(redis.call('HMGET', places, 'freed_ms', 'interval_ms'))
  if last then
    local each = math.max(0, math.min(freed_ms - tonumber(last), 60000)) / number
    local kept = 0.9 ^ number
    mean = mean and kept * tonumber(mean) + (1 - kept) * each or each
    redis.call('HSET', places, 'interval_ms', string.format('%.1f', mean))
  end
  redis.call('HSET', places, 'freed_ms', freed_ms)
end

--- lib/rates
-- needs: lib/now
-- Limits of an API key. Its rates are two buckets, of requests and of tokens, which hold what a minute allows
-- and fill evenly. A request takes the tokens that it may need; at its end, what it has not needed comes back
-- (`lib/terminal`). One that may need more than a minute allows takes all, and its end may leave a debt.

-- What is left of the buckets of a key, or a whole minute's of one that is not known -> requests, tokens.
local function left_of_rates(key, per_minute)
  local requests, tokens, at_ms = unpack(redis.call('HMGET', key, 'requests', 'tokens', 'at_ms'))
  local passed_ms = now_ms() - tonumber(at_ms or '0')
  if passed_ms < -60000 then passed_ms = 60000 end -- the clock was set back
  local share = math.max(0, passed_ms) / 60000
  local function left(limit, known)
    return known and math.min(limit, tonumber(known) + limit * share) or limit
  end
  return left(per_minute.requests, requests), left(per_minute.tokens, tokens)
end

-- The live requests of a key, in all pools.
local function live_of_key(key)
  local live, fields = 0, redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 5) == 'live:' then live = live + tonumber(fields[i + 1]) end
  end
  return live
end

local function set_rates(key, requests, tokens)
  redis.call('HSET', key, 'requests', string.format('%.3f', requests), 'tokens',
    string.format('%.3f', tokens), 'at_ms', now_ms())
end

--- lib/heartbeat
-- needs: lib/now
-- Write the heartbeat of a process that is no worker -> the present, in ms.
-- `member`: kind:name. `fields`: field, value of the hash.
local function write_heartbeat(process, processes, member, ttl_ms, fields)
  redis.call('HSET', process, unpack(fields))
  redis.call('PEXPIRE', process, ttl_ms)
  local beat_ms = now_ms()
  redis.call('ZREMRANGEBYSCORE', processes, '-inf', beat_ms - ttl_ms)
  redis.call('ZADD', processes, beat_ms, member)
  redis.call('PEXPIRE', processes, ttl_ms)
  return beat_ms
end

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
-- request's string, both for `kept_ms`. True for the first caller only.
-- `records` are those of all tokens, whatever the string has, or '' if none are kept. What it has reserved of
-- the rate of its API key and not used comes back, or becomes a debt. The event of its webhook is due with
-- the terminal. `num_used`: tokens that its key pays for, if they are others than `num_tokens`.
local function finish(
  webhooks, request, tokens, reason, num_tokens, error_text, error_type, records, kept_ms, channel, payload,
  num_used
)
  if redis.call('TYPE', request).ok ~= 'hash' then return false end
  if redis.call('HEXISTS', request, 'terminal') == 1 then return false end
  redis.call('HSET', request, 'terminal', reason, 'num_tokens', num_tokens)
  local key, reserved, webhook = unpack(redis.call('HMGET', request, 'key', 'reserved', 'webhook'))
  if reserved then
    redis.call('HDEL', request, 'key', 'reserved')
    if redis.call('HEXISTS', key, 'tokens') == 1 then
      redis.call('HINCRBYFLOAT', key, 'tokens', reserved - (num_used or num_tokens))
    end
  end
  if error_text ~= '' then redis.call('HSET', request, 'error', error_text, 'error_type', error_type) end
  redis.call('PEXPIRE', request, kept_ms)
  if records == '' then redis.call('DEL', tokens) else redis.call('SET', tokens, records, 'PX', kept_ms) end
  if channel ~= '' then redis.call('PUBLISH', channel, payload) end
  if webhook then note_end(webhooks, webhook, reason) end
  return true
end
