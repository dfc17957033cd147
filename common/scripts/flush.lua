-- needs: lib/sealed, lib/terminal, lib/spill
-- Flush of a worker: append to log and reports, and only then publish.
-- A sealed or missing log refuses all of it, and so do streams to which somebody else has written.
-- A repeated flush does nothing.
-- KEYS log, reports, then request of each prompt, then request, result, tokens of each terminal, then tokens
--      of each spill
-- ARGV sequence, log entry, report or '', oldest report to keep, ttl of spilled tokens in ms, numbers of
--      messages, prompts, terminals and spills, '1' to trim the log, then channel, payload of each message;
--      records of each prompt; reason, result, ttl in ms, channel, payload of each terminal; offset, records
--      of each spill
-- Returns 'OK', 'MISSING' or 'SEALED'.
local refusal = sealed_or_missing(KEYS[1])
if refusal then return refusal end
local id, ttl_ms = ARGV[1] .. '-0', ARGV[5]
local messages, prompts = tonumber(ARGV[6]), tonumber(ARGV[7])
local terminals, spills = tonumber(ARGV[8]), tonumber(ARGV[9])
local added = redis.pcall('XADD', KEYS[1], id, 'entry', ARGV[2])
if type(added) == 'table' and added.err then
  if not string.find(added.err, 'equal or smaller') then return redis.error_reply(added.err) end
  local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
  return last[1] == id and last[2][2] == ARGV[2] and 'OK' or 'SEALED'
end
if ARGV[3] ~= '' then
  added = redis.pcall('XADD', KEYS[2], 'MINID', ARGV[4], id, 'report', ARGV[3])
  if type(added) == 'table' and added.err then return 'SEALED' end
end
local key, arg = 3, 11
-- The flush is in the log by now, so a terminal or spill that fails (its keys have another type) must not
-- stop the others.
for _ = 1, messages do
  redis.call('PUBLISH', ARGV[arg], ARGV[arg + 1])
  arg = arg + 2
end
for _ = 1, prompts do
  if redis.call('TYPE', KEYS[key]).ok == 'hash' then redis.call('HSET', KEYS[key], 'prompt', ARGV[arg]) end
  key, arg = key + 1, arg + 1
end
for _ = 1, terminals do
  pcall(finish, KEYS[key], KEYS[key + 1], KEYS[key + 2], unpack(ARGV, arg, arg + 4))
  key, arg = key + 3, arg + 5
end
local all_spilled = true
for _ = 1, spills do
  local done, spilled = pcall(spill, KEYS[key], tonumber(ARGV[arg]), ARGV[arg + 1], ttl_ms)
  all_spilled = done and spilled and all_spilled
  key, arg = key + 1, arg + 2
end
if all_spilled and ARGV[10] == '1' then redis.call('XTRIM', KEYS[1], 'MINID', id) end
return 'OK'
