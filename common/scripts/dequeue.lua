-- Remove the entry of an ended request from the queue.
-- KEYS requests, requests:bytes, tokens   ARGV entry id, bytes of its payload
if redis.call('XDEL', KEYS[1], ARGV[1]) == 1 then redis.call('DECRBY', KEYS[2], ARGV[2]) end
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[2]) end
redis.call('DEL', KEYS[3])
return 1
