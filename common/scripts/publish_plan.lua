-- needs: lib/fenced, lib/sealed
-- Publish a plan, and set the worker of the rows that start with it: all of it, or nothing.
-- KEYS plans, log, epoch, request of each row that starts
-- ARGV plan id, payload, oldest plan id to keep, ttl in ms, worker, then attempt, base, cached tokens of each
-- row
-- Returns {'OK'}, {'MISSING'}, {'SEALED'}, {'FENCED'}, {'GAP'}: the plan before it is not written, or
-- {'refused', n, ...}: rows, counted from 1, that are cancelled or have ended.
local function parse(id)
  local epoch, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(epoch), tonumber(number)
end
local epoch, number = parse(ARGV[1])
if fenced(KEYS[3], epoch) then return {'FENCED', 'a newer epoch has begun'} end
local refusal = sealed_or_missing(KEYS[2])
if refusal then return {refusal} end
local found = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
-- this plan, written before; or an entry of somebody else, which only a later epoch gets past
if found then return {found[2][2] == ARGV[2] and 'OK' or 'FENCED'} end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last and number > 1 then
  local last_epoch, last_number = parse(last[1])
  if last_epoch < epoch or (last_epoch == epoch and last_number < number - 1) then return {'GAP'} end
end
local refused = {'refused'}
for i = 4, #KEYS do
  local request = redis.pcall('HMGET', KEYS[i], 'digest', 'terminal', 'cancel')
  if request.err or not request[1] or request[2] or request[3] then refused[#refused + 1] = i - 3 end
end
if #refused > 1 then return refused end
local added = redis.pcall('XADD', KEYS[1], 'MINID', ARGV[3], ARGV[1], 'plan', ARGV[2])
if type(added) == 'table' and added.err then return {'FENCED', added.err} end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
for i = 4, #KEYS do
  local arg = 3 * i - 6
  redis.call('HSET', KEYS[i], 'worker', ARGV[5], 'attempt', ARGV[arg], 'base', ARGV[arg + 1])
  -- of the run that makes the first token: later ones compute a prompt that the client has been told of
  if ARGV[arg + 1] == '0' then redis.call('HSET', KEYS[i], 'cached', ARGV[arg + 2]) end
end
return {'OK'}
