-- needs: lib/fenced, lib/sealed
-- Publish a plan, and set the worker of the rows that start with it: all of it, or nothing.
-- KEYS plans, log, epoch, ...
-- ARGV plan_id, payload, oldest, ttl_ms, worker, ...
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
if type(added) == 'table' and added.err then return {'FENCED', added.err} end
redis.call('PEXPIRE', plans, ttl_ms)
local arg = first_arg
for i = first_key, #KEYS do
  local attempt, base, num_cached = ARGV[arg], ARGV[arg + 1], ARGV[arg + 2]
  arg = arg + 3
  redis.call('HSET', KEYS[i], 'worker', worker, 'attempt', attempt, 'base', base)
  -- of the run that makes the first token: later ones compute a prompt that the client has been told of
  if base == '0' then redis.call('HSET', KEYS[i], 'cached', num_cached) end
end
return {'OK'}
