--- admit
-- needs: lib/places, lib/rates, lib/usage
-- Admit a request if there is room for it: append one entry to the queue.
-- A class counts itself and the more urgent ones, so the others never take its room. Where several tenants of
-- a class have asked within the last half minute, none has more than its share, by weight, of what the more
-- urgent classes leave.
-- The entry carries what the pool's clock showed, if there is one: the request's deadline counts from there.
-- An API key has limits of its own, over all pools of the broker.
-- KEYS requests, places, request, clock, usage, ...
-- ARGV payload, max_requests, max_bytes, digest, channel, gateway, width, answer,
--      service_class, tenant, weight, num_prompt, logits_bytes, account, key, webhook, ...
-- One more key: tenants of the class. `weight` of the tenant. `width`: records of a
-- token. `answer` that this request begins, or ''. `num_prompt`: tokens of its prompt.
-- `logits_bytes`: the most bytes of logits that it returns; those of all requests are at most `max_bytes`.
-- `account`: who pays for it, with what budget (`read_account`), or ''.
-- `webhook`: to whom the event of its end goes (`lib/webhooks`), or ''.
-- A prompt of more tokens than may wait is admitted when no other waits, and so are more logits.
-- `key`: the hash of what its API key has of its limits, or ''. More arguments, with a key: its most live
-- requests, its requests and tokens a minute (0 is no limit), and what the request takes of these two: tokens
-- of its prompt, and of its answer at most.
-- Returns {'admitted', entry id, left requests, left tokens}, {'attached'}, {'conflict'}, {'budget'}, or
-- {'requests', 'bytes', 'tenant', 'key_live', 'key_requests' or 'key_tokens', what was counted, ms
-- until there may be room, left requests, left tokens}; what is left are texts, '' without a key.
local tenants = KEYS[first_key]
local known = redis.call('HGET', request, 'digest')
if known then return {known == digest and 'attached' or 'conflict'} end
max_requests, num_prompt, logits_bytes = tonumber(max_requests), tonumber(num_prompt), tonumber(logits_bytes)
local WINDOW_MS = 30000
local asked_ms = now_ms()
local weights_field = 'weights:' .. service_class

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
local expired = redis.call('ZRANGEBYSCORE', tenants, '-inf', asked_ms - WINDOW_MS)
if #expired > 0 then
  add_weights(-weight_of(expired))
  redis.call('ZREMRANGEBYSCORE', tenants, '-inf', asked_ms - WINDOW_MS)
end
redis.call('PEXPIRE', tenants, WINDOW_MS)
local num_tenants = redis.call('ZCARD', tenants)
-- Tenants may have expired with their key, and the places not.
if num_tenants == 1 then redis.call('HDEL', places, weights_field) end
local num_classes = CLASS_INDEX[service_class]
local counted = {'all', 'logits', 'tenant:' .. service_class .. ':' .. tenant}
for index = 1, num_classes do
  for _, what in ipairs({'requests:', 'tokens:', 'bytes:'}) do
    counted[#counted + 1] = what .. CLASSES[index]
  end
end
local numbers = redis.call('HMGET', places, unpack(counted))
if redis.call('XLEN', requests) ~= tonumber(numbers[1] or '0') then
  count_places(requests, places)
  numbers = redis.call('HMGET', places, unpack(counted))
end
for i = 1, #counted do numbers[i] = tonumber(numbers[i] or '0') end

-- Sum of one of REQUESTS, TOKENS, BYTES over this class and the more urgent ones, and over those alone.
local REQUESTS, TOKENS, BYTES = 1, 2, 3
local function held(what)
  local sum, above = 0, 0
  for index = 1, num_classes do
    above = sum
    sum = sum + numbers[3 * index + what]
  end
  return sum, above
end

local max_live, per_minute, left_requests, left_tokens
if key ~= '' then
  max_live = tonumber(ARGV[first_arg])
  per_minute = {requests = tonumber(ARGV[first_arg + 1]), tokens = tonumber(ARGV[first_arg + 2])}
  left_requests, left_tokens = left_of_rates(key, per_minute)
end

local function with_rates(reply)
  reply[#reply + 1] = left_requests and string.format('%.3f', left_requests) or ''
  reply[#reply + 1] = left_tokens and string.format('%.3f', left_tokens) or ''
  return reply
end

local function refuse(why, count, excess)
  local interval_ms = tonumber(redis.call('HGET', places, 'interval_ms') or '1000')
  return with_rates({why, count, math.ceil(excess * interval_ms)})
end

local function refuse_rate(why, left, needed, limit)
  return with_rates({why, math.ceil(limit - left), math.ceil((needed - left) * 60000 / limit)})
end

local count, above = held(REQUESTS)
if count >= max_requests then return refuse('requests', count, count - max_requests + 1) end
local total_bytes = held(BYTES)
if total_bytes + #payload > tonumber(max_bytes) then return refuse('bytes', total_bytes, 1) end
local total_logits = logits_bytes > 0 and numbers[2] or 0
if total_logits > 0 and total_logits + logits_bytes > tonumber(max_bytes) then
  return refuse('bytes', total_logits, 1)
end
local own = numbers[3]
if own > 0 and num_tenants > 1 then -- each may have one
  local weights = redis.call('HGET', places, weights_field)
  if not weights then
    weights = weight_of(redis.call('ZRANGE', tenants, 0, -1))
    redis.call('HSET', places, weights_field, weights)
  end
  local share = math.max(1, math.floor((max_requests - above) * tonumber(weight) / tonumber(weights)))
  if own >= share then return refuse('tenant', own, own - share + 1) end
end

local reserved = false
if key ~= '' then
  if max_live > 0 then
    local live = live_of_key(key)
    if live >= max_live then return refuse('key_live', live, live - max_live + 1) end
  end
  local num_requests, num_asked, num_answer = unpack(ARGV, first_arg + 3, first_arg + 5)
  num_requests, num_asked = tonumber(num_requests), tonumber(num_asked)
  if per_minute.requests > 0 then
    if left_requests < num_requests then
      return refuse_rate('key_requests', left_requests, num_requests, per_minute.requests)
    end
    left_requests = left_requests - num_requests
  end
  if per_minute.tokens > 0 then
    local needed = math.min(per_minute.tokens, num_asked + tonumber(num_answer))
    if left_tokens < needed then
      return refuse_rate('key_tokens', left_tokens, needed, per_minute.tokens)
    end
    left_tokens = left_tokens - needed
    reserved = needed - num_asked
  end
end

if key ~= '' then -- without one there is no budget
  if account ~= '' and not load_usage().set_aside(usage, request, account) then return {'budget'} end
  if per_minute.requests > 0 or reserved then set_rates(key, left_requests, left_tokens) end
end
if account ~= '' then redis.call('HSET', request, 'account', account) end
local shown_ms = redis.call('GET', clock)
local id = take_place(
  requests, places, payload, shown_ms, service_class, num_prompt, tenant, logits_bytes, key
)
if reserved then redis.call('HSET', request, 'key', key, 'reserved', reserved) end
redis.call('HSET', request, 'digest', digest, 'channel', channel, 'gateway', gateway, 'entry', id,
  'attempt', 0, 'base', 0, 'crash_count', 0, 'width', width)
if answer ~= '' then redis.call('HSET', request, 'answer', answer) end
if webhook ~= '' then redis.call('HSET', request, 'webhook', webhook) end
return with_rates({'admitted', id})

--- offer
-- needs: lib/places, lib/spill, lib/usage
-- Offer a request as its gateway knows it: what was shown to a client is a fact, whatever the broker has
-- lost. A request that is gone, and with `reopen` one that ended with other tokens, is queued again, after
-- its tokens. A run that began before the last of them, and did not make them, is void: its attempt is over,
-- and the batcher is told.
-- KEYS request, tokens, requests, places, clock, control, usage
-- ARGV payload, digest, channel, gateway, width, made_by, made_in, num_tokens, records, prompt_records,
--      num_cached, ttl_ms, resume, reopen, answer, reader, connection, service_class, num_prompt,
--      tenant, logits_bytes, account, key, webhook
-- `width`: records of a token. `made_by`, `made_in`: worker and attempt that made the last token.
-- `records` of the tokens, kept for `ttl_ms`; `prompt_records` and `num_cached`, of the prompt, may be ''.
-- `resume`: the message to the batcher. `reopen` is '1' or ''. `answer` that this request begins, or ''.
-- `reader`, `connection`: numbers of the reader, and of the one on whose connection it is written.
-- `num_prompt`: tokens of its prompt. `logits_bytes`: the most bytes of logits that it returns.
-- `account`: who pays for it, or ''. Tokens that this broker has not counted are counted.
-- `key`, `webhook`: as in `admit`; its rates are not asked again.
-- Returns {'kept'}, {'ended'}, {'superseded'} (it has a newer reader), {'foreign'} (the key is another
-- request's, or no request's), or {'queued', attempt} or {'void', attempt}: tokens of earlier attempts no
-- longer count.
width, made_in, logits_bytes = tonumber(width), tonumber(made_in), tonumber(logits_bytes)
num_tokens, reader = tonumber(num_tokens), tonumber(reader)
local kind = redis.call('TYPE', request).ok
if kind ~= 'hash' and kind ~= 'none' then return {'foreign'} end
local fields = redis.call('HMGET', request, 'digest', 'worker', 'attempt', 'base', 'terminal')
local known, worker, last, base, terminal = unpack(fields)
if known and known ~= digest then return {'foreign'} end
local newest = tonumber(redis.call('HGET', request, 'reader') or '0')
if reader < newest then return {'superseded'} end -- what that one was shown counts
if reader > newest then -- the broker has lost that it came
  redis.call('HSET', request, 'reader', reader, 'connection', connection, 'gateway', gateway)
end
if terminal and reopen ~= '1' then return {'ended'} end

local function set_tokens()
  redis.call('DEL', tokens)
  if records ~= '' then redis.call('SET', tokens, records, 'PX', ttl_ms) end
end

local meter = load_usage()
local function count_shown()
  meter.count_tokens(usage, request, num_tokens, 0)
  meter.write(usage)
end

if not known or terminal then
  local attempt = math.max(made_in, tonumber(last or '0'))
  local shown_ms = redis.call('GET', clock)
  local id = take_place(
    requests, places, payload, shown_ms, service_class, tonumber(num_prompt), tenant, logits_bytes, key
  )
  redis.call('HDEL', request, 'terminal', 'num_tokens', 'error', 'error_type')
  redis.call('PERSIST', request)
  redis.call('HSET', request, 'digest', digest, 'channel', channel, 'gateway', gateway, 'entry', id,
    'worker', terminal and '' or made_by, 'attempt', attempt, 'base', num_tokens, 'crash_count', 0,
    'width', width)
  if prompt_records ~= '' then redis.call('HSET', request, 'prompt', prompt_records) end
  if num_cached ~= '' then redis.call('HSET', request, 'cached', num_cached) end
  if answer ~= '' then redis.call('HSET', request, 'answer', answer) end
  if webhook ~= '' then redis.call('HSET', request, 'webhook', webhook) end
  if account ~= '' then redis.call('HSET', request, 'account', account) end
  if account ~= '' and not known and num_tokens == 0 then meter.set_aside(usage, request, account, true) end
  set_tokens()
  count_shown()
  return {'queued', attempt}
end

if prompt_records ~= '' then redis.call('HSETNX', request, 'prompt', prompt_records) end
if num_cached ~= '' then redis.call('HSETNX', request, 'cached', num_cached) end
if records == '' then return {'kept'} end
worker, last, base = worker or '', tonumber(last or '0'), tonumber(base or '0')
local had_all = redis.call('TYPE', tokens).ok == 'string' and redis.call('STRLEN', tokens) >= #records
local differs = spill(tokens, 0, records, ttl_ms, width) == -1
if differs then set_tokens() end
count_shown()
if last < made_in and not differs then -- the broker has lost where it was placed
  redis.call('HSET', request, 'worker', made_by, 'attempt', made_in, 'base', num_tokens)
  return {'kept'}
end
local is_other_run = worker ~= made_by or last ~= made_in
if differs or (is_other_run and base < num_tokens and not (worker == '' and had_all)) then
  local attempt = math.max(last, made_in) + 1
  redis.call('HSET', request, 'worker', '', 'attempt', attempt, 'base', num_tokens)
  redis.call('XADD', control, '*', 'resume', resume)
  return {'void', attempt}
end
return {'kept'}

--- cancel
-- Cancel a request: a flag that `publish_plan` checks, and one message to the batcher, which trims what it
-- read. The message is sent even without `request`: the batcher may know a request that the broker has lost.
-- KEYS request, control
-- ARGV payload, reader, digest
-- `reader`: the number of the reader that is gone, 0 for the first, or '' for any reader. `digest`: of what it
-- read, or '' for any: a repetition that was not admitted has the same id.
-- Returns 1, or 0 when the request is not known, has its terminal, has another reader or is another one.
local known = redis.call('TYPE', request).ok == 'hash'
if known and redis.call('HEXISTS', request, 'terminal') == 1 then return 0 end
if known and reader ~= '' and (redis.call('HGET', request, 'reader') or '0') ~= reader then return 0 end
if known and digest ~= '' and redis.call('HGET', request, 'digest') ~= digest then return 0 end
if known and redis.call('HSET', request, 'cancel', 1) == 0 then return 1 end
redis.call('XADD', control, '*', 'cancel', payload)
return known and 1 or 0

--- attach
-- Give all requests of an answer another reader: what its former readers say no longer counts.
-- KEYS ...
-- ARGV gateway, inherited
-- Keys: the request of each choice. `inherited`: '' for a client that came back, or, where a connection is
-- inherited, the number of the reader whose connection it was.
-- Returns {'attached', number of the reader, digest of each request}, {'cancelled'}, {'gone'} when one of
-- them is not known, or {'superseded'} when the client has another connection than the inherited one.
local digests = {}
for i = first_key, #KEYS do
  if redis.call('TYPE', KEYS[i]).ok ~= 'hash' then return {'gone'} end
  local state = redis.call('HMGET', KEYS[i], 'digest', 'cancel', 'terminal')
  if not state[1] then return {'gone'} end
  digests[i] = state[1]
  if state[2] or state[3] == 'cancelled' then return {'cancelled'} end
end
if inherited ~= '' and (redis.call('HGET', KEYS[first_key], 'connection') or '0') ~= inherited then
  return {'superseded'}
end
local reader = redis.call('HINCRBY', KEYS[first_key], 'reader', 1)
if inherited == '' then redis.call('HSET', KEYS[first_key], 'connection', reader) end
for i = first_key, #KEYS do
  redis.call('HSET', KEYS[i], 'reader', reader)
  -- a detached request belongs to no gateway
  if redis.call('HGET', KEYS[i], 'gateway') ~= '' then redis.call('HSET', KEYS[i], 'gateway', gateway) end
end
return {'attached', reader, digests}

--- forget
-- Delete a request that was answered, unless it has another reader or is another one.
-- KEYS request, tokens, logits
-- ARGV reader, digest
-- `reader`: its number, 0 for the first. `digest`: as in `cancel`.
-- Returns 1, or 0 when it has another reader or is another one.
if redis.call('TYPE', request).ok == 'hash' then
  if (redis.call('HGET', request, 'reader') or '0') ~= reader then return 0 end
  if digest ~= '' and redis.call('HGET', request, 'digest') ~= digest then return 0 end
end
redis.call('DEL', request, tokens, logits)
return 1

--- keep_response
-- Note an answer that is kept after it was read, and take the oldest out of the note while there are too
-- many.
-- KEYS responses
-- ARGV request_id, ttl_s, max_kept
-- Returns the ids of those that are to be deleted.
local time = redis.call('TIME')
local now_s = time[1] + time[2] / 1e6
redis.call('ZREMRANGEBYSCORE', responses, '-inf', now_s)
redis.call('ZADD', responses, now_s + tonumber(ttl_s), request_id)
local last_s = redis.call('ZRANGE', responses, -1, -1, 'WITHSCORES')[2]
redis.call('EXPIRE', responses, math.ceil(tonumber(last_s) - now_s))
local surplus = redis.call('ZCARD', responses) - tonumber(max_kept)
if surplus <= 0 then return {} end
local oldest = redis.call('ZRANGE', responses, 0, surplus - 1)
redis.call('ZREMRANGEBYRANK', responses, 0, surplus - 1)
return oldest

--- delete_response
-- Delete an answer that is kept and has ended.
-- KEYS request, tokens, logits, responses
-- ARGV request_id
-- Returns 1, or 0 when it has not ended yet.
if redis.call('TYPE', request).ok == 'hash' and redis.call('HEXISTS', request, 'terminal') == 0 then
  return 0
end
redis.call('DEL', request, tokens, logits)
redis.call('ZREM', responses, request_id)
return 1
