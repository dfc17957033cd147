-- needs: lib/fenced, lib/spill
-- Save what the log of a worker has of requests that it holds no more. Where it still stands for the holder,
-- no worker does afterwards, and the crash count is stored: so a death is counted once. A request that has
-- another attempt than when it was read is left alone: its gateway has offered what it showed meanwhile.
-- KEYS epoch, then tokens, request of each
-- ARGV epoch, ttl in ms, then worker, attempt, crash count, offset, records of each
-- Returns 'OK' or 'FENCED'.
if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end
for i = 1, (#KEYS - 1) / 2 do
  local tokens, request = KEYS[2 * i], KEYS[2 * i + 1]
  local worker, attempt, crash_count, offset, records = unpack(ARGV, 5 * i - 2, 5 * i + 2)
  local is_live = redis.call('TYPE', request).ok == 'hash' and redis.call('HEXISTS', request, 'terminal') == 0
  if is_live and (redis.call('HGET', request, 'attempt') or '0') == attempt then
    if redis.call('HGET', request, 'worker') == worker then
      redis.call('HSET', request, 'worker', '', 'crash_count', crash_count)
    end
    local width = tonumber(redis.call('HGET', request, 'width') or '1')
    spill(tokens, tonumber(offset), records, ARGV[2], width)
  end
end
return 'OK'
