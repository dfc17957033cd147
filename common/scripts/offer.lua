-- needs: lib/places, lib/spill
-- Offer a request as its gateway knows it: what was shown to a client is a fact, whatever the broker has
-- lost. A request that is gone, and with `reopen` one that ended with other tokens, is queued again, behind
-- its tokens. A run that began before the last of them, and did not make them, is void: its attempt is over,
-- and the batcher is told.
-- KEYS request, tokens, requests, places, clock, control
-- ARGV payload, digest, channel, gateway, width, made_by, made_in, num_tokens, records, prompt_records,
--      num_cached, ttl_ms, resume, reopen, answer, reader, connection, class, num_prompt, tenant
-- `width`: records of a token. `made_by`, `made_in`: worker and attempt that made the last token.
-- `records` of the tokens, kept for `ttl_ms`; `prompt_records` and `num_cached`, of the prompt, may be ''.
-- `resume`: the message to the batcher. `reopen` is '1' or ''. `answer` that this request begins, or ''.
-- `reader`, `connection`: numbers of the reader, and of the one on whose connection it is written.
-- `num_prompt`: tokens of its prompt.
-- Returns {'kept'}, {'ended'}, {'superseded'} (it has a newer reader), {'foreign'} (the key is another
-- request's, or no request's), or {'queued', attempt} or {'void', attempt}: tokens of earlier attempts no
-- longer count.
width, made_in = tonumber(width), tonumber(made_in)
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

if not known or terminal then
  local attempt = math.max(made_in, tonumber(last or '0'))
  local shown_ms = redis.call('GET', clock)
  local id = take_place(requests, places, payload, shown_ms, class, tonumber(num_prompt), tenant)
  redis.call('HDEL', request, 'terminal', 'num_tokens', 'error', 'error_type')
  redis.call('PERSIST', request)
  redis.call('HSET', request, 'digest', digest, 'channel', channel, 'gateway', gateway, 'entry', id,
    'worker', terminal and '' or made_by, 'attempt', attempt, 'base', num_tokens, 'crash_count', 0,
    'width', width)
  if prompt_records ~= '' then redis.call('HSET', request, 'prompt', prompt_records) end
  if num_cached ~= '' then redis.call('HSET', request, 'cached', num_cached) end
  if answer ~= '' then redis.call('HSET', request, 'answer', answer) end
  set_tokens()
  return {'queued', attempt}
end

if prompt_records ~= '' then redis.call('HSETNX', request, 'prompt', prompt_records) end
if num_cached ~= '' then redis.call('HSETNX', request, 'cached', num_cached) end
if records == '' then return {'kept'} end
worker, last, base = worker or '', tonumber(last or '0'), tonumber(base or '0')
local had_all = redis.call('TYPE', tokens).ok == 'string' and redis.call('STRLEN', tokens) >= #records
local differs = spill(tokens, 0, records, ttl_ms, width) == -1
if differs then set_tokens() end
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
