-- needs: lib/spill
-- Save what the log of a dead worker has of a request, before the log is deleted.
-- KEYS tokens, request   ARGV offset, records, ttl in ms, crash count
-- Returns 1, or 0 when the request is gone or nothing could be appended.
if redis.call('TYPE', KEYS[2]).ok ~= 'hash' then return 0 end
redis.call('HSET', KEYS[2], 'crash_count', ARGV[4])
return spill(KEYS[1], tonumber(ARGV[1]), ARGV[2], ARGV[3]) and 1 or 0
