-- needs: lib/now
-- Write the heartbeat of a process that is no worker -> the present, in ms.
-- `fields`: kind:name, ttl in ms, then field, value of the hash
local function write_heartbeat(process, processes, fields)
  redis.call('HSET', process, unpack(fields, 3))
  redis.call('PEXPIRE', process, fields[2])
  local beat_ms = now_ms()
  redis.call('ZREMRANGEBYSCORE', processes, '-inf', beat_ms - fields[2])
  redis.call('ZADD', processes, beat_ms, fields[1])
  redis.call('PEXPIRE', processes, fields[2])
  return beat_ms
end
