-- Asks for the end of a request: a flag that every placement checks, and a word to the batcher, which may know the request although its
-- home is gone. KEYS home, control   ARGV payload
-- Returns 1, or 0 when the request is not known (any more) or has its terminal.
local known = redis.call('TYPE', KEYS[1]).ok == 'hash'
if known and redis.call('HEXISTS', KEYS[1], 'terminal') == 1 then return 0 end
if known then redis.call('HSET', KEYS[1], 'cancel', 1) end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 10000, '*', 'cancel', ARGV[1])
return known and 1 or 0
