--- create_logs
-- Create log and reports of an incarnation.
-- KEYS log, reports
-- ARGV owner, ttl_ms
-- `owner`: a random name of the process.
-- Returns 1, also when the owner repeats the call, or 0 when another process has created them: two of them
-- have one incarnation.
local first = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1]
if first then return first[2][1] == 'open' and first[2][2] == owner and 1 or 0 end
for _, stream in ipairs({log, reports}) do
  redis.call('XADD', stream, '0-1', 'open', owner)
  redis.call('PEXPIRE', stream, ttl_ms)
end
return 1

--- flush
-- needs: lib/sealed, lib/terminal, lib/spill, lib/holds, lib/usage
-- Flush of a worker: append to log and reports, and only then publish.
-- A sealed or missing log refuses all of it, and so do streams to which somebody else has written, and a log
-- without the flush before this one: the broker has lost it, and what else was written last.
-- A repeated flush appends and publishes nothing.
-- Spilled tokens are counted, those of terminals, and those of requests whose keys have a budget.
-- KEYS log, reports, usage, webhooks, ...
-- ARGV sequence, report, oldest, ttl_ms, worker, num_messages, num_prompts, num_terminals, num_spills,
--      num_counts, mode, ...
-- `report` is '' for none; `oldest` report to keep; `ttl_ms` of spilled tokens. `mode`: 'trim' trims the log,
-- 'whole' follows whatever it has (tokens of requests whose end is lost stand nowhere else), or ''.
-- More keys: request of each prompt; request, tokens of each terminal; request, tokens of each spill; request
-- of each count.
-- More arguments: channel, payload of each message: the log has all of them, those with a channel are
-- published; records of each prompt; attempt, base, reason, num_tokens, error_text, error_type, records,
-- kept_ms, channel, payload, num_used, num_speculated of each terminal; attempt, base, offset, records,
-- num_speculated of each spill; attempt, base, num_tokens, num_speculated of each count. `num_speculated`:
-- tokens of this attempt that needed no step of their own.
-- Returns {'OK', ...} with one number for each spill: 1, 0 when it would leave a hole, -1 when the request is
-- another worker's, has ended or has other tokens; then one for each count: the tokens that its key may still
-- get, 0 or less when its budget is reached; or {'GAP'}, {'MISSING'} or {'SEALED'}.
local id, key, arg = sequence .. '-0', first_key, first_arg
local meter = num_terminals .. num_spills .. num_counts ~= '000' and load_usage()

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
    local _, is_first = pcall(finish, webhooks, KEYS[key], KEYS[key + 1], unpack(ARGV, arg + 2, arg + 10))
    local number, speculated = tonumber(ARGV[arg + 10]), tonumber(ARGV[arg + 11])
    if is_first == true then
      meter.count_end(usage, KEYS[key], number, ARGV[arg], speculated, ARGV[arg + 2])
    end
  end
  key, arg = key + 2, arg + 12
end
local answer, all_spilled = {'OK'}, true
for _ = 1, tonumber(num_spills) do
  local spilled = -1
  if holds(KEYS[key], worker, tonumber(ARGV[arg]), ARGV[arg + 1]) then
    local width = tonumber(redis.call('HGET', KEYS[key], 'width') or '1')
    spilled = spill(KEYS[key + 1], tonumber(ARGV[arg + 2]), ARGV[arg + 3], ttl_ms, width)
    if spilled == 1 then
      local speculated = meter.speculated_since(KEYS[key], ARGV[arg], tonumber(ARGV[arg + 4]))
      meter.count_saved(usage, KEYS[key], KEYS[key + 1], width, speculated)
    end
  end
  answer[#answer + 1] = spilled
  all_spilled = all_spilled and spilled ~= 0
  key, arg = key + 2, arg + 5
end
if all_spilled and mode == 'trim' then redis.call('XTRIM', log, 'MINID', id) end
local accounts = {}
for i = 1, tonumber(num_counts) do
  local is_held = holds(KEYS[key], worker, tonumber(ARGV[arg]), ARGV[arg + 1])
  if is_held then
    local speculated = meter.speculated_since(KEYS[key], ARGV[arg], tonumber(ARGV[arg + 3]))
    accounts[i] = meter.count_tokens(usage, KEYS[key], tonumber(ARGV[arg + 2]), speculated)
  end
  accounts[i] = accounts[i] or false
  key, arg = key + 1, arg + 4
end
if meter then meter.write(usage) end
for _, account in ipairs(accounts) do answer[#answer + 1] = meter.tokens_left(usage, account) end
return answer

--- write_logits
-- needs: lib/sealed, lib/holds
-- Append one piece of a request's logits to its list. An attempt begins the list anew. The field `logits` of
-- the request's hash says which attempt has written how many rows. A repeated call changes nothing.
-- KEYS log, ...
-- ARGV worker, attempt, base, place, num_rows, values, ttl_ms
-- More keys: request, logits. `place`: of the first row among those that the request returns.
-- Returns 1, 0 when rows before these are missing, -1 when the request is another worker's or has ended, or
-- 'MISSING' or 'SEALED'.
local request, logits = KEYS[first_key], KEYS[first_key + 1]
local refusal = sealed_or_missing(log)
if refusal then return refusal end
if not holds(request, worker, tonumber(attempt), base) then return -1 end
place, num_rows = tonumber(place), tonumber(num_rows)
local written = redis.call('HGET', request, 'logits') or ''
local writer, num_written = string.match(written, '^(%d+) (%d+)$')
num_written = writer == attempt and tonumber(num_written) or 0
if num_written >= place + num_rows then return 1 end
if num_written ~= place then return 0 end
if place == 0 then redis.call('DEL', logits) end
if redis.call('RPUSH', logits, values) == 1 and place > 0 then
  redis.call('DEL', logits)
  return 0
end
redis.call('HSET', request, 'logits', attempt .. ' ' .. (place + num_rows))
redis.call('PEXPIRE', logits, ttl_ms)
return 1

--- worker_heartbeat
-- needs: lib/now, lib/sealed
-- Heartbeat of a worker. The batcher is notified of its first, and when it begins to drain.
-- KEYS worker, workers, log, reports, plans, control
-- ARGV incarnation, ttl_ms, streams_ttl_ms, state, step, capacity, ...
-- More arguments: field, value of the hash.
-- Returns 'OK', or 'DRAIN' once it was asked to leave, or 'SEALED' or 'MISSING': then it is a worker no more.
local refusal = sealed_or_missing(log) or (sealed_or_missing(reports) and 'SEALED')
if refusal then return refusal end
local is_draining = state == 'draining' and redis.call('HGET', worker, 'state') ~= 'draining'
redis.call('HSET', worker, 'state', state, 'step', step, 'capacity', capacity, unpack(ARGV, first_arg))
redis.call('PEXPIRE', worker, ttl_ms)
local is_new = redis.call('ZADD', workers, now_ms(), incarnation) == 1
if is_new or is_draining then redis.call('XADD', control, '*', 'worker_ready', incarnation) end
for _, key in ipairs({workers, log, reports, plans}) do redis.call('PEXPIRE', key, streams_ttl_ms) end
return redis.call('HEXISTS', worker, 'drain') == 1 and 'DRAIN' or 'OK'
