-- Seal an incarnation: its heartbeat is deleted, and nothing can be appended to its streams any more.
-- KEYS log, reports, worker, workers   ARGV incarnation, why: 'died', 'drained' or 'unreadable'
-- Returns 1, or 0 when its log does not exist.
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[1])
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local SEAL = '18446744073709551615-18446744073709551615' -- the highest id: every later XADD is refused
for i = 1, 2 do
  local is_sealed = #redis.call('XRANGE', KEYS[i], SEAL, SEAL) == 1
  if not is_sealed then redis.call('XADD', KEYS[i], SEAL, 'sealed', ARGV[1], 'why', ARGV[2] or 'died') end
end
return 1
