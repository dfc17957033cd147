-- Send the new frames of a job, each once, whichever gateway comes first; and store its answer, once.
-- KEYS job, reply, result, ...
-- ARGV channel, max_entries, ttl_ms, request_ttl_ms, job_ttl_ms, answer, num_heard, ...
-- More keys: of the requests. With the answer they expire in `request_ttl_ms`, the job and the stream `reply`
-- in `ttl_ms`; a job that goes on expires in `job_ttl_ms`. `max_entries` is '0' without a stream.
-- More arguments: lane, index in its lane, text of each frame; the channel has heard the first `num_heard`.
-- A lane is one choice; frames of a lane come in order, from any index.
-- Returns the number of frames that were new, -1 when `job` has another type, or -2, with nothing done,
-- when frames before these are missing: the broker has lost them, and all are to be offered.
local kind = redis.call('TYPE', job).ok
if kind ~= 'hash' and kind ~= 'none' then return -1 end

local function next_index(target, lane)
  return tonumber(redis.call('HGET', job, target .. ':' .. lane) or '0')
end

local seen = {}
for i = first_arg, #ARGV, 3 do
  local lane, index = ARGV[i], tonumber(ARGV[i + 1])
  if not seen[lane] then
    if channel ~= '' and next_index(channel, lane) < index then return -2 end
    if max_entries ~= '0' and next_index('stream', lane) < index then return -2 end
    seen[lane] = true
  end
end

if answer ~= '' and redis.call('HEXISTS', job, 'last') == 0 then
  redis.call('HSET', job, 'last', #ARGV >= first_arg and ARGV[#ARGV] or answer)
  redis.call('PEXPIRE', job, ttl_ms)
  redis.call('SET', result, answer, 'PX', ttl_ms)
  for i = first_key, #KEYS do redis.call('PEXPIRE', KEYS[i], request_ttl_ms) end
end

local function take_if_next(target, lane, index)
  if next_index(target, lane) ~= index then return false end
  redis.call('HSET', job, target .. ':' .. lane, index + 1)
  return true
end

local num_new = 0
for i = first_arg, #ARGV, 3 do
  local lane, index, frame = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local is_new = false
  if channel ~= '' and take_if_next(channel, lane, index) then
    if (i - first_arg) / 3 >= tonumber(num_heard) then redis.call('PUBLISH', channel, frame) end
    is_new = true
  end
  if max_entries ~= '0' and take_if_next('stream', lane, index) then
    local id = redis.call('HINCRBY', job, 'entries', 1) .. '-0'
    redis.pcall('XADD', reply, 'MAXLEN', max_entries, id, 'frame', frame)
    is_new = true
  end
  if is_new then num_new = num_new + 1 end
end
if redis.call('HEXISTS', job, 'last') == 0 then redis.call('PEXPIRE', job, job_ttl_ms) end
if max_entries ~= '0' then redis.call('PEXPIRE', reply, ttl_ms) end
return num_new
