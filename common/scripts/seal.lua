-- needs: lib/sealed
-- Seal an incarnation: its heartbeat is deleted, and nothing can be appended to its streams any more.
-- It stands in the set `sealed` until a batcher has removed it.
-- KEYS log, reports, worker, workers, sealed
-- ARGV incarnation, why, ttl_ms
-- `why`: 'died', 'drained' or 'unreadable'. `ttl_ms`: of the set.
-- Returns 1, or 0 when its log does not exist.
redis.call('DEL', worker)
redis.call('ZREM', workers, incarnation)
if sealed_or_missing(log) == 'MISSING' then return 0 end
for _, stream in ipairs({log, reports}) do
  if sealed_or_missing(stream) ~= 'SEALED' then
    redis.call('XADD', stream, SEAL, 'sealed', incarnation, 'why', why)
  end
end
redis.call('SADD', sealed, incarnation)
redis.call('PEXPIRE', sealed, ttl_ms)
return 1
