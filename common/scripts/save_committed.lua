-- needs: lib/fenced, lib/spill
-- Save what the log of a worker has of requests that it holds no more. Where it still stands for the holder,
-- no worker does afterwards, and the crash count is stored: so a death is counted once. A request that has
-- another attempt than when it was read is left alone: its gateway has offered what it showed meanwhile.
-- KEYS epoch, ...
-- ARGV own_epoch, ttl_ms, ...
-- More keys: request, tokens of each. More arguments: worker, attempt, crash_count, offset, records of each.
-- Returns 'OK' or 'FENCED'.
if fenced(epoch, own_epoch) then return 'FENCED' end
local arg = first_arg
for key = first_key, #KEYS, 2 do
  local request, tokens = KEYS[key], KEYS[key + 1]
  local worker, attempt, crash_count, offset, records = unpack(ARGV, arg, arg + 4)
  arg = arg + 5
  local is_live = redis.call('TYPE', request).ok == 'hash' and redis.call('HEXISTS', request, 'terminal') == 0
  if is_live and (redis.call('HGET', request, 'attempt') or '0') == attempt then
    if redis.call('HGET', request, 'worker') == worker then
      redis.call('HSET', request, 'worker', '', 'crash_count', crash_count)
    end
    local width = tonumber(redis.call('HGET', request, 'width') or '1')
    spill(tokens, tonumber(offset), records, ttl_ms, width)
  end
end
return 'OK'
