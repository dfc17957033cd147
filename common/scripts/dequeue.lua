-- Remove the entry of an ended request from the queue.
-- KEYS requests, requests:bytes, tokens, request   ARGV entry id, bytes of its payload
-- Returns 1, or 0 when the request has not ended: the worker that said so was not the one to say it.
if redis.call('TYPE', KEYS[4]).ok == 'hash' and redis.call('HEXISTS', KEYS[4], 'terminal') == 0 then return 0 end
if redis.call('XDEL', KEYS[1], ARGV[1]) == 1 then redis.call('DECRBY', KEYS[2], ARGV[2]) end
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[2]) end
redis.call('DEL', KEYS[3])
return 1
