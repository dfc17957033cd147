-- Ask a worker to drain: it learns so with its next heartbeat. A repeated call changes nothing.
-- KEYS worker   Returns {its state, its number of rows}, or nothing when there is no such worker.
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
redis.call('HSET', KEYS[1], 'drain', 1)
return redis.call('HMGET', KEYS[1], 'state', 'rows')
