-- needs: lib/places
-- Remove the entry of an ended request from the queue: its place is free. Its tokens stay with its hash.
-- KEYS requests, requests:places, tokens, request   ARGV entry id
-- Returns 1, or 0 when the request has not ended: the worker that said so was not the one to say it.
local is_known = redis.call('TYPE', KEYS[4]).ok == 'hash'
if is_known and redis.call('HEXISTS', KEYS[4], 'terminal') == 0 then return 0 end
return_place(KEYS[1], KEYS[2], ARGV[1])
if not is_known then redis.call('DEL', KEYS[3]) end
return 1
