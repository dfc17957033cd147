-- Register a job, or find that it runs or has ended. Of an ended job the last frame is sent again.
-- KEYS job, reply stream
-- ARGV digest, ttl in ms, channel or '', '1' for the reply stream, ttl of the reply stream in ms
-- Returns 'live', 'ended', 'conflict', or 'spoiled' when KEYS[1] has another type.
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then return 'spoiled' end
local digest, last = unpack(redis.call('HMGET', KEYS[1], 'digest', 'last'))
if digest and digest ~= ARGV[1] then return 'conflict' end
if last then
  if ARGV[3] ~= '' then redis.call('PUBLISH', ARGV[3], last) end
  if ARGV[4] == '1' and redis.call('EXISTS', KEYS[2]) == 0 then
    redis.call('XADD', KEYS[2], '1-0', 'frame', last)
    redis.call('PEXPIRE', KEYS[2], ARGV[5])
  end
  return 'ended'
end
redis.call('HSET', KEYS[1], 'digest', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'live'
