-- Create log and reports of an incarnation; no change when they exist.
-- KEYS log, reports   ARGV incarnation, ttl in ms
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
for i = 1, 2 do
  redis.call('XADD', KEYS[i], '0-1', 'open', ARGV[1])
  redis.call('PEXPIRE', KEYS[i], ARGV[2])
end
return 1
