-- Create log and reports of an incarnation.
-- KEYS log, reports
-- ARGV owner, ttl_ms
-- `owner`: a random name of the process.
-- Returns 1, also when the owner repeats the call, or 0 when another process has created them: two of them
-- have one incarnation.
local first = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1]
if first then return first[2][1] == 'open' and first[2][2] == owner and 1 or 0 end
for _, stream in ipairs({log, reports}) do
  redis.call('XADD', stream, '0-1', 'open', owner)
  redis.call('PEXPIRE', stream, ttl_ms)
end
return 1
