-- needs: lib/places, lib/spill
-- Offer a request as its gateway knows it: what was shown to a client is a fact, whatever the broker has
-- lost. A request that is gone, and with '1' one that ended with other tokens, is queued again, behind its
-- tokens. A run that began before the last of them, and did not make them, is void: its attempt is over, and
-- the batcher is told.
-- KEYS request, tokens, requests, requests:places, clock, control
-- ARGV payload, digest, channel, gateway, records of a token, worker and attempt that made the last token,
--      number of tokens, their records, records of the prompt or '', its cached tokens or '', ttl of tokens
--      in ms, message to the batcher, '1' or '', the answer that this request begins or '', numbers of the
--      reader, and of the one on whose connection it is written, class, tokens of its prompt, tenant
-- Returns {'kept'}, {'ended'}, {'superseded'} (it has a newer reader), {'foreign'} (the key is another
-- request's, or no request's), or {'queued', attempt} or {'void', attempt}: tokens of earlier attempts no
-- longer count.
local request, tokens, records = KEYS[1], KEYS[2], ARGV[9]
local width, made_by, made_in, num_tokens = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local kind = redis.call('TYPE', request).ok
if kind ~= 'hash' and kind ~= 'none' then return {'foreign'} end
local fields = redis.call('HMGET', request, 'digest', 'worker', 'attempt', 'base', 'terminal')
local digest, worker, last, base, terminal = unpack(fields)
if digest and digest ~= ARGV[2] then return {'foreign'} end
local reader, newest = tonumber(ARGV[16]), tonumber(redis.call('HGET', request, 'reader') or '0')
if reader < newest then return {'superseded'} end -- what that one was shown counts
if reader > newest then -- the broker has lost that it came
  redis.call('HSET', request, 'reader', reader, 'connection', ARGV[17], 'gateway', ARGV[4])
end
if terminal and ARGV[14] ~= '1' then return {'ended'} end

local function set_tokens()
  redis.call('DEL', tokens)
  if records ~= '' then redis.call('SET', tokens, records, 'PX', ARGV[12]) end
end

if not digest or terminal then
  local attempt = math.max(made_in, tonumber(last or '0'))
  local class, num_prompt, tenant = unpack(ARGV, 18, 20)
  local clock = redis.call('GET', KEYS[5])
  local id = take_place(KEYS[3], KEYS[4], ARGV[1], clock, class, tonumber(num_prompt), tenant)
  redis.call('HDEL', request, 'terminal', 'num_tokens', 'error', 'error_type')
  redis.call('PERSIST', request)
  redis.call('HSET', request, 'digest', ARGV[2], 'channel', ARGV[3], 'gateway', ARGV[4], 'entry', id,
    'worker', terminal and '' or made_by, 'attempt', attempt, 'base', num_tokens, 'crash_count', 0,
    'width', width)
  if ARGV[10] ~= '' then redis.call('HSET', request, 'prompt', ARGV[10]) end
  if ARGV[11] ~= '' then redis.call('HSET', request, 'cached', ARGV[11]) end
  if ARGV[15] ~= '' then redis.call('HSET', request, 'answer', ARGV[15]) end
  set_tokens()
  return {'queued', attempt}
end

if ARGV[10] ~= '' then redis.call('HSETNX', request, 'prompt', ARGV[10]) end
if ARGV[11] ~= '' then redis.call('HSETNX', request, 'cached', ARGV[11]) end
if records == '' then return {'kept'} end
worker, last, base = worker or '', tonumber(last or '0'), tonumber(base or '0')
local had_all = redis.call('TYPE', tokens).ok == 'string' and redis.call('STRLEN', tokens) >= #records
local differs = spill(tokens, 0, records, ARGV[12], width) == -1
if differs then set_tokens() end
if last < made_in and not differs then -- the broker has lost where it was placed
  redis.call('HSET', request, 'worker', made_by, 'attempt', made_in, 'base', num_tokens)
  return {'kept'}
end
local is_other_run = worker ~= made_by or last ~= made_in
if differs or (is_other_run and base < num_tokens and not (worker == '' and had_all)) then
  local attempt = math.max(last, made_in) + 1
  redis.call('HSET', request, 'worker', '', 'attempt', attempt, 'base', num_tokens)
  redis.call('XADD', KEYS[6], '*', 'resume', ARGV[13])
  return {'void', attempt}
end
return {'kept'}
