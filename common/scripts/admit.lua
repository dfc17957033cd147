-- needs: lib/places
-- Admit a request if there is room for it: append one entry to the queue.
-- A class counts itself and the more urgent ones, so the others never take its room. Where several tenants of
-- a class have asked within the last half minute, none has more than its share, by weight, of what the more
-- urgent classes leave.
-- The entry carries what the pool's clock showed, if there is one: the request's deadline counts from there.
-- KEYS requests, places, request, clock, tenants
-- ARGV payload, max_requests, max_tokens, max_bytes, digest, channel, gateway, width, answer, class, tenant,
--      weight, num_prompt
-- `tenants` of the class; `weight` of the tenant; `max_tokens` may be ''. `width`: records of a token.
-- `answer` that this request begins, or ''. `num_prompt`: tokens of its prompt.
-- A prompt of more tokens than may wait is admitted when no other waits.
-- Returns {'admitted', entry id}, {'attached'}, {'conflict'}, or {'requests', 'tokens', 'bytes' or 'tenant',
-- what was counted, ms until there may be room}.
local known = redis.call('HGET', request, 'digest')
if known then return {known == digest and 'attached' or 'conflict'} end
max_requests, num_prompt = tonumber(max_requests), tonumber(num_prompt)
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
add_weights(redis.call('ZADD', tenants, asked_ms, weight .. ' ' .. tenant) * tonumber(weight))
add_weights(-weight_of(redis.call('ZRANGEBYSCORE', tenants, '-inf', asked_ms - WINDOW_MS)))
redis.call('ZREMRANGEBYSCORE', tenants, '-inf', asked_ms - WINDOW_MS)
redis.call('PEXPIRE', tenants, WINDOW_MS)
local num_tenants = redis.call('ZCARD', tenants)
-- Tenants may have expired with their key, and the places not.
if num_tenants == 1 then redis.call('HDEL', places, weights_field) end
if redis.call('XLEN', requests) ~= tonumber(redis.call('HGET', places, 'all') or '0') then
  count_places(requests, places)
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
if max_tokens ~= '' and total_tokens > 0 and total_tokens + num_prompt > tonumber(max_tokens) then
  return refuse('tokens', total_tokens, 1)
end
if total_bytes + #payload > tonumber(max_bytes) then return refuse('bytes', total_bytes, 1) end
local own = tonumber(redis.call('HGET', places, 'tenant:' .. class .. ':' .. tenant) or '0')
if own > 0 and num_tenants > 1 then -- each may have one
  local weights = redis.call('HGET', places, weights_field)
  if not weights then
    weights = weight_of(redis.call('ZRANGE', tenants, 0, -1))
    redis.call('HSET', places, weights_field, weights)
  end
  local share = math.max(1, math.floor((max_requests - above) * tonumber(weight) / tonumber(weights)))
  if own >= share then return refuse('tenant', own, own - share + 1) end
end

local id = take_place(requests, places, payload, redis.call('GET', clock), class, num_prompt, tenant)
redis.call('HSET', request, 'digest', digest, 'channel', channel, 'gateway', gateway, 'entry', id,
  'attempt', 0, 'base', 0, 'crash_count', 0, 'width', width)
if answer ~= '' then redis.call('HSET', request, 'answer', answer) end
return {'admitted', id}
