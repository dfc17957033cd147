-- Claim the jobs of a gateway without a heartbeat, or that its launcher says has died. A consumer that holds
-- none is deleted.
-- KEYS submit, gateway   ARGV group, the dead gateway, the claiming gateway, max jobs
-- Returns the ids of the entries claimed.
if redis.call('EXISTS', KEYS[2]) == 1 and redis.call('HGET', KEYS[2], 'state') ~= 'died' then return {} end
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[4], ARGV[2])
if #pending == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
  return {}
end
local claim = {'XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0}
for _, entry in ipairs(pending) do claim[#claim + 1] = entry[1] end
claim[#claim + 1] = 'JUSTID'
return redis.call(unpack(claim))
