--- publish_plan
-- needs: lib/fenced, lib/sealed
-- Publish a plan, and set the worker of the rows that start with it: all of it, or nothing.
-- KEYS plans, log, epoch, ...
-- ARGV plan_id, payload, oldest, ttl_ms, incarnation, ...
-- `oldest` plan id to keep. More keys: request of each row that starts. More arguments: attempt, base,
-- num_cached of each.
-- Returns {'OK'}, {'MISSING'}, {'SEALED'}, {'FENCED'}, {'GAP'}: the plan before it is not written, or
-- {'refused', n, ...}: rows, counted from 1, that are cancelled or have ended.
local function parse(id)
  local epoch, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(epoch), tonumber(number)
end
local own_epoch, number = parse(plan_id)
if fenced(epoch, own_epoch) then return {'FENCED', 'a newer epoch has begun'} end
local refusal = sealed_or_missing(log)
if refusal then return {refusal} end
local kind = redis.call('TYPE', plans).ok
if kind ~= 'stream' and kind ~= 'none' then return {'MISSING'} end -- the key is somebody else's
local found = redis.call('XRANGE', plans, plan_id, plan_id)[1]
-- this plan, written before; or an entry of somebody else, which only a later epoch gets past
if found then return {found[2][2] == payload and 'OK' or 'FENCED'} end
local last = redis.call('XREVRANGE', plans, '+', '-', 'COUNT', 1)[1]
if last and number > 1 then
  local last_epoch, last_number = parse(last[1])
  if last_epoch < own_epoch or (last_epoch == own_epoch and last_number < number - 1) then return {'GAP'} end
end
local refused = {'refused'}
for i = first_key, #KEYS do
  local request = redis.pcall('HMGET', KEYS[i], 'digest', 'terminal', 'cancel')
  if request.err or not request[1] or request[2] or request[3] then
    refused[#refused + 1] = i - first_key + 1
  end
end
if #refused > 1 then return refused end
local added = redis.pcall('XADD', plans, 'MINID', oldest, plan_id, 'plan', payload)
if type(added) == 'table' and added.err then -- or the broker is full
  return string.find(added.err, 'equal or smaller', 1, true) and {'FENCED', added.err} or added
end
redis.call('PEXPIRE', plans, ttl_ms)
local arg = first_arg
for i = first_key, #KEYS do
  local attempt, base, num_cached = ARGV[arg], ARGV[arg + 1], ARGV[arg + 2]
  arg = arg + 3
  redis.call('HSET', KEYS[i], 'worker', incarnation, 'attempt', attempt, 'base', base)
  -- of the run that makes the first token: later ones compute a prompt that the client has been told of
  if base == '0' then redis.call('HSET', KEYS[i], 'cached', num_cached) end
end
return {'OK'}

--- dequeue
-- needs: lib/places
-- Remove the entries of ended requests from the queue: their places are free. Tokens stay with their hashes.
-- KEYS requests, places, ...
-- ARGV ...
-- More keys: request, tokens of each. More arguments: entry id of each.
-- A request that has another entry by now has ended, and its id was asked for again.
-- Returns for each 1, or 0 when it has not ended: the worker that said so was not the one to say it.
local replies, ended = {}, {}
for i = first_arg, #ARGV do
  local request = KEYS[first_key + 2 * (i - first_arg)]
  local tokens = KEYS[first_key + 2 * (i - first_arg) + 1]
  local is_known = redis.call('TYPE', request).ok == 'hash'
  local has_ended = not is_known or redis.call('HEXISTS', request, 'terminal') == 1
    or (redis.call('HGET', request, 'entry') or ARGV[i]) ~= ARGV[i]
  if has_ended then ended[#ended + 1] = ARGV[i] end
  if not is_known then redis.call('DEL', tokens) end
  replies[#replies + 1] = has_ended and 1 or 0
end
return_places(requests, places, ended)
return replies

--- finish
-- needs: lib/fenced, lib/terminal, lib/usage
-- Publish the batcher's terminal of a request that no worker holds, and count its tokens.
-- KEYS epoch, request, tokens, usage, webhooks
-- ARGV own_epoch, reason, num_tokens, error_text, error_type, kept_ms, channel, payload
-- Returns 'OK', 'ENDED' when it has ended already, or 'FENCED'.
if fenced(epoch, own_epoch) then return 'FENCED' end
local is_first = finish(
  webhooks, request, tokens, reason, num_tokens, error_text, error_type, '', kept_ms, channel, payload
)
if not is_first then return 'ENDED' end
local meter = load_usage()
meter.count_end(usage, request, tonumber(num_tokens))
meter.write(usage)
return 'OK'

--- save_committed
-- needs: lib/fenced, lib/spill, lib/usage
-- Save and count what the log of a worker has of requests that it holds no more. Where it still stands for
-- the holder, no worker does afterwards, and the crash count is stored: so a death is counted once. A request
-- that has another attempt than when it was read is left alone: its gateway has offered what it showed
-- meanwhile.
-- KEYS epoch, usage, ...
-- ARGV own_epoch, ttl_ms, ...
-- More keys: request, tokens of each. More arguments: worker, attempt, crash_count, offset, records,
-- num_speculated of each: of tokens that are not counted yet, how many needed no step of their own.
-- Returns 'OK' or 'FENCED'.
if fenced(epoch, own_epoch) then return 'FENCED' end
local arg, meter = first_arg, load_usage()
for key = first_key, #KEYS, 2 do
  local request, tokens = KEYS[key], KEYS[key + 1]
  local worker, attempt, crash_count, offset, records, num_speculated = unpack(ARGV, arg, arg + 5)
  arg = arg + 6
  local is_live = redis.call('TYPE', request).ok == 'hash' and redis.call('HEXISTS', request, 'terminal') == 0
  if is_live and (redis.call('HGET', request, 'attempt') or '0') == attempt then
    if redis.call('HGET', request, 'worker') == worker then
      redis.call('HSET', request, 'worker', '', 'crash_count', crash_count)
    end
    local width = tonumber(redis.call('HGET', request, 'width') or '1')
    if spill(tokens, tonumber(offset), records, ttl_ms, width) == 1 then
      meter.count_saved(usage, request, tokens, width, tonumber(num_speculated))
    end
  end
end
meter.write(usage)
return 'OK'

--- publish_state
-- needs: lib/heartbeat
-- What the active batcher tells at an interval: the counts of its scheduler, and its heartbeat. Messages of
-- `control` that it has handled are trimmed.
-- KEYS control, state, process, processes
-- ARGV oldest, state_ttl_ms, num_counts, member, ttl_ms, ...
-- `oldest` message to keep; `process`, `member`, `ttl_ms` as in `heartbeat`. More arguments: name, number of
-- each of the counts, then field, value of the heartbeat.
local first_field = first_arg + 2 * num_counts
local counts, fields = {unpack(ARGV, first_arg, first_field - 1)}, {unpack(ARGV, first_field)}
write_heartbeat(process, processes, member, ttl_ms, fields)
redis.call('XTRIM', control, 'MINID', '~', oldest)
redis.call('HSET', state, unpack(counts))
redis.call('PEXPIRE', state, state_ttl_ms)
return 1
