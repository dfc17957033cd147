-- Takes jobs of a gateway that shows no sign of life; a consumer that holds none is forgotten.
-- KEYS submit, gateway   ARGV group, the dead gateway, who takes over, how many at most
-- Returns the ids of the entries taken.
if redis.call('EXISTS', KEYS[2]) == 1 then return {} end
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', ARGV[4], ARGV[2])
if #pending == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
  return {}
end
local claim = {'XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0}
for _, entry in ipairs(pending) do claim[#claim + 1] = entry[1] end
claim[#claim + 1] = 'JUSTID'
return redis.call(unpack(claim))
