-- Claim the jobs of a gateway without a heartbeat, or that its launcher says has died. A consumer that holds
-- none is deleted.
-- KEYS submit, gateway
-- ARGV group, dead, claimer, max_jobs
-- `gateway`: the hash of the dead gateway. `dead`, `claimer`: its name, and that of the claiming gateway.
-- Returns the ids of the entries claimed.
if redis.call('EXISTS', gateway) == 1 and redis.call('HGET', gateway, 'state') ~= 'died' then return {} end
local pending = redis.call('XPENDING', submit, group, '-', '+', max_jobs, dead)
if #pending == 0 then
  redis.call('XGROUP', 'DELCONSUMER', submit, group, dead)
  return {}
end
local claim = {'XCLAIM', submit, group, claimer, 0}
for _, entry in ipairs(pending) do claim[#claim + 1] = entry[1] end
claim[#claim + 1] = 'JUSTID'
return redis.call(unpack(claim))
