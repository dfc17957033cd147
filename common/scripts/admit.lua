-- needs: lib/places
-- Admit a request if there is room for it: append one entry to the queue.
-- A class counts itself and the more urgent ones, so the others never take its room. Where several tenants of
-- a class have asked within the last half minute, none has more than its share, by weight, of what the more
-- urgent classes leave.
-- The entry carries what the pool's clock showed, if there is one: the request's deadline counts from there.
-- KEYS requests, requests:places, request, clock, tenants of the class
-- ARGV payload, max requests, max bytes, digest, channel, gateway, records of a token, the answer that this
-- request begins or '', class, tenant, its weight, tokens of its prompt, max tokens or ''
-- A prompt of more tokens than may wait is admitted when no other waits.
-- Returns {'admitted', entry id}, {'attached'}, {'conflict'}, or {'requests', 'tokens', 'bytes' or 'tenant',
-- what was counted, ms until there may be room}.
local digest = redis.call('HGET', KEYS[3], 'digest')
if digest then return {digest == ARGV[4] and 'attached' or 'conflict'} end
local places, class, tenant = KEYS[2], ARGV[9], ARGV[10]
local tokens, max_requests = tonumber(ARGV[12]), tonumber(ARGV[2])
local WINDOW_MS = 30000
local asked_ms = now_ms()
local weights_field = 'weights:' .. class

local function weight_of(members)
  local sum = 0
  for _, member in ipairs(members) do sum = sum + tonumber(string.match(member, '^%S+')) end
  return sum
end

-- The sum of weights is kept, as long as the places are: of 10,000 tenants it would take milliseconds each
-- time.
local function add_weights(sum)
  if sum ~= 0 and redis.call('HEXISTS', places, weights_field) == 1 then
    redis.call('HINCRBYFLOAT', places, weights_field, sum)
  end
end

-- A broker without memory refuses a script at its first write only, and only one that may take memory.
add_weights(redis.call('ZADD', KEYS[5], asked_ms, ARGV[11] .. ' ' .. tenant) * tonumber(ARGV[11]))
add_weights(-weight_of(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', asked_ms - WINDOW_MS)))
redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', asked_ms - WINDOW_MS)
redis.call('PEXPIRE', KEYS[5], WINDOW_MS)
local num_tenants = redis.call('ZCARD', KEYS[5])
-- Tenants may have expired with their key, and the places not.
if num_tenants == 1 then redis.call('HDEL', places, weights_field) end
if redis.call('XLEN', KEYS[1]) ~= tonumber(redis.call('HGET', places, 'all') or '0') then
  count_places(KEYS[1], places)
end

local function held(what)
  local sum, above = 0, 0
  for index = 1, CLASS_INDEX[class] do
    above = sum
    sum = sum + tonumber(redis.call('HGET', places, what .. ':' .. CLASSES[index]) or '0')
  end
  return sum, above
end

local function refuse(why, count, excess)
  local interval_ms = tonumber(redis.call('HGET', places, 'interval_ms') or '1000')
  return {why, count, math.ceil(excess * interval_ms)}
end

local count, above = held('requests')
if count >= max_requests then return refuse('requests', count, count - max_requests + 1) end
local total_tokens, total_bytes = held('tokens'), held('bytes')
if ARGV[13] ~= '' and total_tokens > 0 and total_tokens + tokens > tonumber(ARGV[13]) then
  return refuse('tokens', total_tokens, 1)
end
if total_bytes + #ARGV[1] > tonumber(ARGV[3]) then return refuse('bytes', total_bytes, 1) end
local own = tonumber(redis.call('HGET', places, 'tenant:' .. class .. ':' .. tenant) or '0')
if own > 0 and num_tenants > 1 then -- each may have one
  local weights = redis.call('HGET', places, weights_field)
  if not weights then
    weights = weight_of(redis.call('ZRANGE', KEYS[5], 0, -1))
    redis.call('HSET', places, weights_field, weights)
  end
  local share = math.max(1, math.floor((max_requests - above) * tonumber(ARGV[11]) / tonumber(weights)))
  if own >= share then return refuse('tenant', own, own - share + 1) end
end

local id = take_place(KEYS[1], places, ARGV[1], redis.call('GET', KEYS[4]), class, tokens, tenant)
redis.call('HSET', KEYS[3], 'digest', ARGV[4], 'channel', ARGV[5], 'gateway', ARGV[6], 'entry', id,
  'attempt', 0, 'base', 0, 'crash_count', 0, 'width', ARGV[7])
if ARGV[8] ~= '' then redis.call('HSET', KEYS[3], 'answer', ARGV[8]) end
return {'admitted', id}
