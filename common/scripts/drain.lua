-- Ask a worker to drain: it learns so with its next heartbeat. A repeated call changes nothing.
-- KEYS worker
-- Returns {its state, its number of rows}, or nothing when there is no such worker.
if redis.call('EXISTS', worker) == 0 then return false end
redis.call('HSET', worker, 'drain', 1)
return redis.call('HMGET', worker, 'state', 'rows')
