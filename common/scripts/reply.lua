-- Says what is new of a job's frames, each once, whoever says it; and stores its answer, if that is there and nobody has.
-- KEYS job, reply stream, result, then keys that expire with the answer
-- ARGV channel or '', most entries of the reply stream or '0', ttl of answer and stream in ms, of the other keys, of a job that goes on,
--      answer or '', then for each frame: lane, index in its lane, text. Frames of one lane come in order, from any index.
-- Returns the number of frames that were new to the channel or the stream, or -1 when the key of the job is none of ours.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then return -1 end
local channel, most, ttl_ms, answer = ARGV[1], ARGV[2], ARGV[3], ARGV[6]

if answer ~= '' and redis.call('HEXISTS', KEYS[1], 'last') == 0 then
  redis.call('HSET', KEYS[1], 'last', #ARGV > 6 and ARGV[#ARGV] or answer)
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  redis.call('SET', KEYS[3], answer, 'PX', ttl_ms)
  for i = 4, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
end

local function is_next(place, lane, index)
  local field = place .. ':' .. lane
  if tonumber(redis.call('HGET', KEYS[1], field) or '0') ~= index then return false end
  redis.call('HSET', KEYS[1], field, index + 1)
  return true
end

local new = 0
for i = 7, #ARGV, 3 do
  local lane, index, frame = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local fresh = false
  if channel ~= '' and is_next(channel, lane, index) then
    redis.call('PUBLISH', channel, frame)
    fresh = true
  end
  if most ~= '0' and is_next('stream', lane, index) then
    local id = redis.call('HINCRBY', KEYS[1], 'entries', 1) .. '-0'
    redis.pcall('XADD', KEYS[2], 'MAXLEN', most, id, 'frame', frame)
    fresh = true
  end
  if fresh then new = new + 1 end
end
if redis.call('HEXISTS', KEYS[1], 'last') == 0 then redis.call('PEXPIRE', KEYS[1], ARGV[5]) end
if most ~= '0' then redis.call('PEXPIRE', KEYS[2], ttl_ms) end
return new
