-- Send the new frames of a job, each once, whichever gateway comes first; and store its answer, once.
-- KEYS job, reply stream, result, then keys that expire with the answer
-- ARGV channel or '', max entries of the reply stream or '0', ttl of answer and stream in ms, ttl of the
--      other keys, ttl of a job that goes on, answer or '', number of the first frames below that the channel
--      has heard already, then lane, index in its lane, text of each frame. A lane is one choice; frames of a
--      lane come in order, from any index.
-- Returns the number of frames that were new, -1 when KEYS[1] has another type, or -2, with nothing done,
-- when frames before these are missing: the broker has lost them, and all are to be offered.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then return -1 end
local channel, max_entries, ttl_ms, answer = ARGV[1], ARGV[2], ARGV[3], ARGV[6]
local num_heard, first = tonumber(ARGV[7]), 8

local function next_index(target, lane)
  return tonumber(redis.call('HGET', KEYS[1], target .. ':' .. lane) or '0')
end

local seen = {}
for i = first, #ARGV, 3 do
  local lane, index = ARGV[i], tonumber(ARGV[i + 1])
  if not seen[lane] then
    if channel ~= '' and next_index(channel, lane) < index then return -2 end
    if max_entries ~= '0' and next_index('stream', lane) < index then return -2 end
    seen[lane] = true
  end
end

if answer ~= '' and redis.call('HEXISTS', KEYS[1], 'last') == 0 then
  redis.call('HSET', KEYS[1], 'last', #ARGV >= first and ARGV[#ARGV] or answer)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  redis.call('SET', KEYS[3], answer, 'PX', ttl_ms)
  for i = 4, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
end

local function take_if_next(target, lane, index)
  if next_index(target, lane) ~= index then return false end
  redis.call('HSET', KEYS[1], target .. ':' .. lane, index + 1)
  return true
end

local num_new = 0
for i = first, #ARGV, 3 do
  local lane, index, frame = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local is_new = false
  if channel ~= '' and take_if_next(channel, lane, index) then
    if (i - first) / 3 >= num_heard then redis.call('PUBLISH', channel, frame) end
    is_new = true
  end
  if max_entries ~= '0' and take_if_next('stream', lane, index) then
    local id = redis.call('HINCRBY', KEYS[1], 'entries', 1) .. '-0'
    redis.pcall('XADD', KEYS[2], 'MAXLEN', max_entries, id, 'frame', frame)
    is_new = true
  end
  if is_new then num_new = num_new + 1 end
end
if redis.call('HEXISTS', KEYS[1], 'last') == 0 then redis.call('PEXPIRE', KEYS[1], ARGV[5]) end
if max_entries ~= '0' then redis.call('PEXPIRE', KEYS[2], ttl_ms) end
return num_new
