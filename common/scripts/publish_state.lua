-- needs: lib/heartbeat
-- What the active batcher tells at an interval: the counts of its scheduler, that its pool is in use, and its
-- heartbeat. Messages of `control` that it has handled are trimmed.
-- KEYS control, state, pools, hash of the batcher, processes
-- ARGV oldest message to keep, ttl of the state in ms, pool, ttl of pools in s ('' while no pool is removed),
--      number of counts, then name, number of each, then as in `heartbeat`
local counts, last = {}, 5 + 2 * ARGV[5]
for i = 6, last do counts[i - 5] = ARGV[i] end
local now_s = write_heartbeat(KEYS[4], KEYS[5], {unpack(ARGV, last + 1)}) / 1000
redis.call('XTRIM', KEYS[1], 'MINID', '~', ARGV[1])
redis.call('HSET', KEYS[2], unpack(counts))
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('ZADD', KEYS[3], now_s, ARGV[3])
if ARGV[4] ~= '' then redis.call('ZREMRANGEBYSCORE', KEYS[3], 0, now_s - ARGV[4]) end
return 1
