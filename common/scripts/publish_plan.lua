-- needs: lib/sealed
-- Hands a plan to a worker, and with it the rows that start: either all of it happens, or nothing.
-- KEYS plans, log, home of each row that starts
-- ARGV plan id, payload, oldest plan id to keep, ttl in ms, worker, then for each row: attempt, base
-- Returns {'OK'}, {'MISSING'}, {'SEALED'}, {'FENCED'}, or {'refused', n, ...}: rows (counted from 1) that are cancelled or have ended.
local refusal = sealed_or_missing(KEYS[2])
if refusal then return {refusal} end
local refused = {'refused'}
for i = 3, #KEYS do
  local home = redis.pcall('HMGET', KEYS[i], 'digest', 'terminal', 'cancel')
  if home.err or not home[1] or home[2] or home[3] then refused[#refused + 1] = i - 2 end
end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last and last[1] == ARGV[1] then return {last[2][2] == ARGV[2] and 'OK' or 'FENCED'} end -- else a stranger's: an epoch further on gets past it
if #refused > 1 then return refused end
local added = redis.pcall('XADD', KEYS[1], 'MINID', ARGV[3], ARGV[1], 'plan', ARGV[2])
if type(added) == 'table' and added.err then return {'FENCED', added.err} end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
for i = 3, #KEYS do
  redis.call('HSET', KEYS[i], 'worker', ARGV[5], 'attempt', ARGV[2 * i], 'base', ARGV[2 * i + 1])
end
return {'OK'}
