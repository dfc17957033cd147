-- needs: lib/places
-- Remove the entry of an ended request from the queue: its place is free. Its tokens stay with its hash.
-- KEYS requests, places, tokens, request
-- ARGV entry_id
-- Returns 1, or 0 when the request has not ended: the worker that said so was not the one to say it.
local is_known = redis.call('TYPE', request).ok == 'hash'
if is_known and redis.call('HEXISTS', request, 'terminal') == 0 then return 0 end
return_place(requests, places, entry_id)
if not is_known then redis.call('DEL', tokens) end
return 1
