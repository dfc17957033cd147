-- Create log and reports of an incarnation.
-- KEYS log, reports   ARGV owner: a random name of the process, ttl in ms
-- Returns 1, also when the owner repeats the call, or 0 when another process has created them: two of them
-- have one incarnation.
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if first then return first[2][1] == 'open' and first[2][2] == ARGV[1] and 1 or 0 end
for i = 1, 2 do
  redis.call('XADD', KEYS[i], '0-1', 'open', ARGV[1])
  redis.call('PEXPIRE', KEYS[i], ARGV[2])
end
return 1
