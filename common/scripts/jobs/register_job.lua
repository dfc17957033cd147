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
