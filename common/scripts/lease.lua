-- Take, renew or release the lease of the active batcher.
-- KEYS batcher, epoch, clock
-- ARGV holder, ttl_ms, own_epoch, clock_ms
-- `ttl_ms` 0 releases the lease. `own_epoch` is '' for one who takes it. The holder sets the clock to
-- `clock_ms`; one who takes the lease says '', or where the clock has stopped, which takes it from a holder
-- that is gone.
-- Returns the epoch, or '' when another holds the lease or a newer epoch has begun; and the server's id.
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local other, last = redis.call('GET', batcher), redis.call('GET', epoch)
if other and other ~= holder then
  if own_epoch ~= '' or clock_ms == '' or redis.call('GET', clock) ~= clock_ms then return {'', server} end
end
if ttl_ms == '0' then
  redis.call('DEL', batcher)
  return {'', server}
end
if own_epoch == '' then
  local now = redis.call('TIME')
  own_epoch = string.format('%.0f', now[1] * 1000000 + now[2])
  if last and tonumber(last) >= tonumber(own_epoch) then
    own_epoch = string.format('%.0f', tonumber(last) + 1)
  end
  redis.call('SET', epoch, own_epoch)
  redis.call('INCR', clock) -- it goes on: others that saw it stopped do not take the lease from this one
elseif last ~= own_epoch then
  return {'', server}
else
  redis.call('SET', clock, clock_ms)
end
redis.call('SET', batcher, holder, 'PX', ttl_ms)
return {own_epoch, server}
