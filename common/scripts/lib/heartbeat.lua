-- Write the heartbeat of a process that is no worker -> the present, in ms.
-- `fields`: kind:name, ttl in ms, then field, value of the hash
local function write_heartbeat(process, processes, fields)
  redis.call('HSET', process, unpack(fields, 3))
  redis.call('PEXPIRE', process, fields[2])
  local now = redis.call('TIME')
  local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
  redis.call('ZREMRANGEBYSCORE', processes, '-inf', now_ms - fields[2])
  redis.call('ZADD', processes, now_ms, fields[1])
  redis.call('PEXPIRE', processes, fields[2])
  return now_ms
end
