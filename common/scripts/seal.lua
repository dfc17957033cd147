-- needs: lib/sealed
-- Seal an incarnation: its heartbeat is deleted, and nothing can be appended to its streams any more.
-- It stands in the set `sealed` until a batcher has removed it.
-- KEYS log, reports, worker, workers, sealed
-- ARGV incarnation, why: 'died', 'drained' or 'unreadable', ttl of the set in ms
-- Returns 1, or 0 when its log does not exist.
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[1])
if sealed_or_missing(KEYS[1]) == 'MISSING' then return 0 end
for i = 1, 2 do
  if sealed_or_missing(KEYS[i]) ~= 'SEALED' then
    redis.call('XADD', KEYS[i], SEAL, 'sealed', ARGV[1], 'why', ARGV[2])
  end
end
redis.call('SADD', KEYS[5], ARGV[1])
redis.call('PEXPIRE', KEYS[5], ARGV[3])
return 1
