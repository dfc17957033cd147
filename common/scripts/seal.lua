-- Ends an incarnation: nothing can be appended to its logs after this. KEYS log, reports, worker, workers   ARGV incarnation
-- Returns 1, or 0 when there is no such log.
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[1])
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local SEAL = '18446744073709551615-18446744073709551615'
for i = 1, 2 do
  if #redis.call('XRANGE', KEYS[i], SEAL, SEAL) == 0 then redis.call('XADD', KEYS[i], SEAL, 'sealed', ARGV[1]) end
end
return 1
