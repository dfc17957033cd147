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
-- 'MISSING' or 'SEALED' when nothing can be appended to a log, else false.
local SEAL = '18446744073709551615-18446744073709551615' -- the highest id: every later XADD is refused
local function sealed_or_missing(log)
  if redis.call('EXISTS', log) == 0 then return 'MISSING' end
  if #redis.call('XRANGE', log, SEAL, SEAL) == 1 then return 'SEALED' end
  return false
end

--- lib/places
-- needs: lib/now
-- Places of live requests: how many of each class and tenant the stream `requests` has, and what they weigh.
-- The entry of a request says in its field `place` what it takes: class, tokens of the prompt, tenant; and
-- in `logits`, if it returns some, the most bytes of them. So what an entry took comes back when it is
-- deleted, whichever script does it. A sum that does not fit the stream, as after entries of an older
-- version, is counted anew.
local CLASSES = {'interactive', 'standard', 'batch'} -- the most urgent first
local CLASS_INDEX = {}
for index, class in ipairs(CLASSES) do CLASS_INDEX[class] = index end

local function read_place(entry)
  local payload, place, logits = '', '', 0
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'place' then place = entry[2][i + 1] end
    if entry[2][i] == 'generate' then payload = entry[2][i + 1] end
    if entry[2][i] == 'logits' then logits = tonumber(entry[2][i + 1]) end
  end
  local class, tokens, tenant = string.match(place, '^(%a+) (%d+) (.*)$')
  if not CLASS_INDEX[class] then return 'standard', 0, '', #payload, logits end
  return class, tonumber(tokens), tenant, #payload, logits
end

-- Count `number` requests of a tenant, and what they take together; negative numbers take them away.
local function add_places(places, number, class, tokens, tenant, bytes, logits)
  redis.call('HINCRBY', places, 'all', number)
  redis.call('HINCRBY', places, 'requests:' .. class, number)
  redis.call('HINCRBY', places, 'tokens:' .. class, tokens + 0) -- Redis 7.0 takes no -0
  redis.call('HINCRBY', places, 'bytes:' .. class, bytes + 0)
  if logits ~= 0 then redis.call('HINCRBY', places, 'logits', logits) end
  local own = 'tenant:' .. class .. ':' .. tenant
  if redis.call('HINCRBY', places, own, number) <= 0 then redis.call('HDEL', places, own) end
end

local function count_places(requests, places)
  redis.call('DEL', places)
  for _, entry in ipairs(redis.call('XRANGE', requests, '-', '+')) do
    add_places(places, 1, read_place(entry))
  end
end

-- Append the entry of a request. Returns its id.
local function take_place(requests, places, payload, clock, class, tokens, tenant, logits)
  local entry = {'generate', payload, 'place', class .. ' ' .. tokens .. ' ' .. tenant}
  if clock then entry[5], entry[6] = 'clock', clock end
  if logits > 0 then entry[#entry + 1], entry[#entry + 2] = 'logits', logits end
  local id = redis.call('XADD', requests, '*', unpack(entry))
  add_places(places, 1, class, tokens, tenant, #payload, logits)
  return id
end

-- Delete entries, and note how long it takes on average until a place is free.
local function return_places(requests, places, ids)
  local number, sums = 0, {}
  for _, id in ipairs(ids) do
    local entry = redis.call('XRANGE', requests, id, id)[1]
    if entry and redis.call('XDEL', requests, id) > 0 then
      local class, tokens, tenant, bytes, logits = read_place(entry)
      local own = class .. ' ' .. tenant
      local sum = sums[own] or {0, class, 0, tenant, 0, 0}
      sums[own] = {sum[1] - 1, class, sum[3] - tokens, tenant, sum[5] - bytes, sum[6] - logits}
      number = number + 1
    end
  end
  if number == 0 then return end
  if redis.call('XLEN', requests) == 0 then
    redis.call('DEL', places)
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
