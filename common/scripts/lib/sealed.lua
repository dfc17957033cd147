-- 'MISSING' or 'SEALED' when nothing can be appended to a log, else false.
local SEAL = '18446744073709551615-18446744073709551615' -- the highest id: every later XADD is refused
local function sealed_or_missing(log)
  if redis.call('EXISTS', log) == 0 then return 'MISSING' end
  if #redis.call('XRANGE', log, SEAL, SEAL) == 1 then return 'SEALED' end
  return false
end
