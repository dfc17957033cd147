-- needs: lib/sealed
-- Seal an incarnation: its heartbeat is deleted, and nothing can be appended to its streams any more.
-- KEYS log, reports, worker, workers   ARGV incarnation, why: 'died', 'drained' or 'unreadable'
-- Returns 1, or 0 when its log does not exist.
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[1])
if sealed_or_missing(KEYS[1]) == 'MISSING' then return 0 end
for i = 1, 2 do
  if sealed_or_missing(KEYS[i]) ~= 'SEALED' then
    redis.call('XADD', KEYS[i], SEAL, 'sealed', ARGV[1], 'why', ARGV[2] or 'died')
  end
end
return 1
