--- register_job
-- Register a job, or find that it runs or has ended. Of an ended job the last frame is sent again.
-- KEYS job, reply
-- ARGV digest, ttl_ms, channel, in_stream, reply_ttl_ms
-- `in_stream` is '1' where the stream `reply` gets the frames, too.
-- Returns 'live', 'ended', 'conflict', or 'spoiled' when `job` has another type.
local kind = redis.call('TYPE', job).ok
if kind ~= 'hash' and kind ~= 'none' then return 'spoiled' end
local known, last = unpack(redis.call('HMGET', job, 'digest', 'last'))
if known and known ~= digest then return 'conflict' end
if last then
  if channel ~= '' then redis.call('PUBLISH', channel, last) end
  if in_stream == '1' and redis.call('EXISTS', reply) == 0 then
    redis.call('XADD', reply, '1-0', 'frame', last)
    redis.call('PEXPIRE', reply, reply_ttl_ms)
  end
  return 'ended'
end
redis.call('HSET', job, 'digest', digest)
redis.call('PEXPIRE', job, ttl_ms)
return 'live'

--- claim_jobs
-- Claim the jobs of a gateway without a heartbeat, or that its launcher says has died. A consumer that holds
-- none is deleted.
-- KEYS submit, gateway
-- ARGV group, dead, claimer, max_jobs
-- `gateway`: the hash of the dead gateway. `dead`, `claimer`: its name, and that of the claiming gateway.
-- Returns the ids of the entries claimed.
if redis.call('EXISTS', gateway) == 1 and redis.call('HGET', gateway, 'state') ~= 'died' then return {} end
local pending = redis.call('XPENDING', submit, group, '-', '+', max_jobs, dead)
if #pending == 0 then
  redis.call('XGROUP', 'DELCONSUMER', submit, group, dead)
  return {}
end
local claim = {'XCLAIM', submit, group, claimer, 0}
for _, entry in ipairs(pending) do claim[#claim + 1] = entry[1] end
claim[#claim + 1] = 'JUSTID'
return redis.call(unpack(claim))

--- reply
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

--- cancel_job
-- Cancel a job. One that is not known yet is marked, as its entry may still come.
-- KEYS job
-- ARGV mark_ttl_ms
-- Returns as how many requests it was admitted, or -1 when it has ended or the key has another type.
local kind = redis.call('TYPE', job).ok
if kind ~= 'hash' and kind ~= 'none' then return -1 end
if redis.call('HEXISTS', job, 'last') == 1 then return -1 end
redis.call('HSET', job, 'cancel', 1)
if kind == 'none' then redis.call('PEXPIRE', job, mark_ttl_ms) end
return tonumber(redis.call('HGET', job, 'choices') or '0')
