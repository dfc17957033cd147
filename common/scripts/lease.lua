-- Take, renew or release the lease of the active batcher.
-- KEYS batcher, epoch, clock
-- ARGV holder, ttl in ms (0 releases), epoch held ('' takes the lease), clock in ms: the holder sets it; one
--      who takes the lease says '', or where the clock has stopped, which takes it from a holder that is gone
-- Returns the epoch, or '' when another holds the lease or a newer epoch has begun; and the server's id.
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local holder, last = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then
  if ARGV[3] ~= '' or ARGV[4] == '' or redis.call('GET', KEYS[3]) ~= ARGV[4] then return {'', server} end
end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
  return {'', server}
end
local epoch = ARGV[3]
if epoch == '' then
  local now = redis.call('TIME')
  epoch = string.format('%.0f', now[1] * 1000000 + now[2])
  if last and tonumber(last) >= tonumber(epoch) then epoch = string.format('%.0f', tonumber(last) + 1) end
  redis.call('SET', KEYS[2], epoch)
  redis.call('INCR', KEYS[3]) -- it goes on: others that saw it stopped do not take the lease from this one
elseif last ~= epoch then
  return {'', server}
else
  redis.call('SET', KEYS[3], ARGV[4])
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {epoch, server}
