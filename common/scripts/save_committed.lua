-- needs: lib/spill
-- Keeps what a dead incarnation's log says of a request, before that log goes. KEYS tokens, home   ARGV offset, records, ttl in ms, strikes
if redis.call('TYPE', KEYS[2]).ok ~= 'hash' then return 0 end
redis.call('HSET', KEYS[2], 'crash_count', ARGV[4])
return spill(KEYS[1], tonumber(ARGV[1]), ARGV[2], ARGV[3]) and 1 or 0
