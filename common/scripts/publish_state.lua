-- needs: lib/heartbeat
-- What the active batcher tells at an interval: the counts of its scheduler, that its pool is in use, and its
-- heartbeat. Messages of `control` that it has handled are trimmed.
-- KEYS control, state, pools, process, processes
-- ARGV oldest, state_ttl_ms, pool, pool_ttl_s, num_counts, member, ttl_ms, ...
-- `oldest` message to keep; `pool_ttl_s` is '' while no pool is removed; `process`, `member`, `ttl_ms` as in
-- `heartbeat`. More arguments: name, number of each of the counts, then field, value of the heartbeat.
local first_field = first_arg + 2 * num_counts
local counts, fields = {unpack(ARGV, first_arg, first_field - 1)}, {unpack(ARGV, first_field)}
local now_s = write_heartbeat(process, processes, member, ttl_ms, fields) / 1000
redis.call('XTRIM', control, 'MINID', '~', oldest)
redis.call('HSET', state, unpack(counts))
redis.call('PEXPIRE', state, state_ttl_ms)
redis.call('ZADD', pools, now_s, pool)
if pool_ttl_s ~= '' then redis.call('ZREMRANGEBYSCORE', pools, 0, now_s - pool_ttl_s) end
return 1
