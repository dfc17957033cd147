-- needs: lib/now
-- Write the heartbeat of a process that is no worker -> the present, in ms.
-- `member`: kind:name. `fields`: field, value of the hash.
local function write_heartbeat(process, processes, member, ttl_ms, fields)
  redis.call('HSET', process, unpack(fields))
  redis.call('PEXPIRE', process, ttl_ms)
  local beat_ms = now_ms()
  redis.call('ZREMRANGEBYSCORE', processes, '-inf', beat_ms - ttl_ms)
  redis.call('ZADD', processes, beat_ms, member)
  redis.call('PEXPIRE', processes, ttl_ms)
  return beat_ms
end
