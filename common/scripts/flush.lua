-- needs: lib/sealed, lib/terminal, lib/spill
-- One flush of a worker: log and report are appended, and only then is anything published. A sealed or missing log refuses all of it; a
-- flush that is sent again does nothing. Where a stranger has written to the streams, nothing can follow: that is as good as a seal.
-- KEYS log, reports, then home of each prompt that is told of, then home, result, tokens of each terminal, then tokens of each spill
-- ARGV sequence, log entry, report or '', oldest report to keep, ttl of spilled tokens in ms, number of messages, prompts, terminals, spills,
--      '1' to trim the log, then channel, payload of each message; records of each prompt; reason, result, ttl in ms, channel, payload of each
--      terminal; offset, records of each spill
-- Returns 'OK', 'MISSING' or 'SEALED'.
local refusal = sealed_or_missing(KEYS[1])
if refusal then return refusal end
local id, ttl_ms = ARGV[1] .. '-0', ARGV[5]
local messages, prompts, terminals, spills = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
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
-- A terminal or a spill that cannot be done (somebody wrote to its keys) must not take the others with it: the flush is on record already.
for _ = 1, messages do
  redis.call('PUBLISH', ARGV[arg], ARGV[arg + 1])
  arg = arg + 2
end
for _ = 1, prompts do
  if redis.call('TYPE', KEYS[key]).ok == 'hash' then redis.call('HSET', KEYS[key], 'prompt', ARGV[arg]) end
  key, arg = key + 1, arg + 1
end
for _ = 1, terminals do
  pcall(finish, KEYS[key], KEYS[key + 1], KEYS[key + 2], ARGV[arg], ARGV[arg + 1], ARGV[arg + 2], ARGV[arg + 3], ARGV[arg + 4])
  key, arg = key + 3, arg + 5
end
local whole = true
for _ = 1, spills do
  local done, spilled = pcall(spill, KEYS[key], tonumber(ARGV[arg]), ARGV[arg + 1], ttl_ms)
  whole = done and spilled and whole
  key, arg = key + 1, arg + 2
end
if whole and ARGV[10] == '1' then redis.call('XTRIM', KEYS[1], 'MINID', id) end
return 'OK'
