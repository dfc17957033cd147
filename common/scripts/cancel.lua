-- Asks for the end of a request: a flag that every placement checks, and a word to the batcher.
-- KEYS home, control   ARGV payload
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'terminal') == 1 then return 0 end
redis.call('HSET', KEYS[1], 'cancel', 1)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 10000, '*', 'cancel', ARGV[1])
return 1
