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

local function add_place(places, sign, class, tokens, tenant, bytes, logits)
  redis.call('HINCRBY', places, 'all', sign)
  redis.call('HINCRBY', places, 'requests:' .. class, sign)
  redis.call('HINCRBY', places, 'tokens:' .. class, sign * tokens + 0) -- Redis 7.0 takes no -0
  redis.call('HINCRBY', places, 'bytes:' .. class, sign * bytes + 0)
  if logits > 0 then redis.call('HINCRBY', places, 'logits', sign * logits) end
  local own = 'tenant:' .. class .. ':' .. tenant
  if redis.call('HINCRBY', places, own, sign) <= 0 then redis.call('HDEL', places, own) end
end

local function count_places(requests, places)
  redis.call('DEL', places)
  for _, entry in ipairs(redis.call('XRANGE', requests, '-', '+')) do
    add_place(places, 1, read_place(entry))
  end
end

-- Append the entry of a request. Returns its id.
local function take_place(requests, places, payload, clock, class, tokens, tenant, logits)
  local entry = {'generate', payload, 'place', class .. ' ' .. tokens .. ' ' .. tenant}
  if clock then entry[5], entry[6] = 'clock', clock end
  if logits > 0 then entry[#entry + 1], entry[#entry + 2] = 'logits', logits end
  local id = redis.call('XADD', requests, '*', unpack(entry))
  add_place(places, 1, class, tokens, tenant, #payload, logits)
  return id
end

-- Delete an entry, and note how long it takes on average until a place is free.
local function return_place(requests, places, id)
  local entry = redis.call('XRANGE', requests, id, id)[1]
  if not entry or redis.call('XDEL', requests, id) == 0 then return end
  if redis.call('XLEN', requests) == 0 then
    redis.call('DEL', places)
    return
  end
  add_place(places, -1, read_place(entry))
  local freed_ms = now_ms()
  local last, mean = unpack(redis.call('HMGET', places, 'freed_ms', 'interval_ms'))
  if last then
    local since = math.max(0, math.min(freed_ms - tonumber(last), 60000))
    mean = mean and 0.9 * tonumber(mean) + 0.1 * since or since
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
