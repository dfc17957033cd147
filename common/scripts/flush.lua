-- needs: lib/sealed, lib/terminal, lib/spill, lib/holds
-- Flush of a worker: append to log and reports, and only then publish.
-- A sealed or missing log refuses all of it, and so do streams to which somebody else has written, and a log
-- without the flush before this one: the broker has lost it, and what else was written last.
-- A repeated flush appends and publishes nothing.
-- KEYS log, reports, ...
-- ARGV sequence, report, oldest, ttl_ms, worker, num_messages, num_prompts, num_terminals, num_spills, mode,
--      ...
-- `report` is '' for none; `oldest` report to keep; `ttl_ms` of spilled tokens. `mode`: 'trim' trims the log,
-- 'whole' follows whatever it has (tokens of requests whose end is lost stand nowhere else), or ''.
-- More keys: request of each prompt; request, tokens of each terminal; request, tokens of each spill.
-- More arguments: channel, payload of each message: the log has all of them, those with a channel are
-- published; records of each prompt; attempt, base, reason, num_tokens, error_text, error_type, records,
-- ttl_ms, channel, payload of each terminal; attempt, base, offset, records of each spill.
-- Returns {'OK', ...} with one number for each spill: 1, 0 when it would leave a hole, -1 when the request is
-- another worker's, has ended or has other tokens; or {'GAP'}, {'MISSING'} or {'SEALED'}.
local id, key, arg = sequence .. '-0', first_key, first_arg

local entry = {}
for i = 1, tonumber(num_messages) do
  entry[2 * i - 1], entry[2 * i] = 'entry:' .. ARGV[arg + 2 * i - 2], ARGV[arg + 2 * i - 1]
end
if num_messages == '0' then entry = {'entry', ''} end
local function is_written(fields)
  for i = 1, math.max(#fields, #entry) do
    if fields[i] ~= entry[i] then return false end
  end
  return true
end

local last = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
if not last then return {'MISSING'} end
if last[1] == SEAL then return {'SEALED'} end
local is_new = last[1] ~= id
if is_new then
  local gap = tonumber(sequence) - tonumber(string.match(last[1], '^%d+'))
  if gap <= 0 then return {'SEALED'} end
  if gap > 1 and mode ~= 'whole' then return {'GAP'} end
  redis.call('XADD', log, id, unpack(entry))
elseif not is_written(last[2]) then
  return {'SEALED'}
end
if is_new and report ~= '' then
  local added = redis.pcall('XADD', reports, 'MINID', oldest, id, 'report', report)
  if type(added) == 'table' and added.err then return {'SEALED'} end
end

-- The flush is in the log by now, so a terminal or spill that fails (its keys have another type) must not
-- stop the others.
for _ = 1, tonumber(num_messages) do
  if is_new and ARGV[arg] ~= '' then redis.call('PUBLISH', ARGV[arg], ARGV[arg + 1]) end
  arg = arg + 2
end
for _ = 1, tonumber(num_prompts) do
  if redis.call('TYPE', KEYS[key]).ok == 'hash' then redis.call('HSET', KEYS[key], 'prompt', ARGV[arg]) end
  key, arg = key + 1, arg + 1
end
for _ = 1, tonumber(num_terminals) do
  if holds(KEYS[key], worker, tonumber(ARGV[arg]), ARGV[arg + 1]) then
    pcall(finish, KEYS[key], KEYS[key + 1], unpack(ARGV, arg + 2, arg + 9))
  end
  key, arg = key + 2, arg + 10
end
local answer, all_spilled = {'OK'}, true
for _ = 1, tonumber(num_spills) do
  local spilled = -1
  if holds(KEYS[key], worker, tonumber(ARGV[arg]), ARGV[arg + 1]) then
    local width = tonumber(redis.call('HGET', KEYS[key], 'width') or '1')
    spilled = spill(KEYS[key + 1], tonumber(ARGV[arg + 2]), ARGV[arg + 3], ttl_ms, width)
  end
  answer[#answer + 1] = spilled
  all_spilled = all_spilled and spilled ~= 0
  key, arg = key + 2, arg + 4
end
if all_spilled and mode == 'trim' then redis.call('XTRIM', log, 'MINID', id) end
return answer
