--- lease
-- Take, renew or release the lease of the active batcher.
-- KEYS batcher, epoch, clock
-- ARGV holder, ttl_ms, own_epoch, clock_ms
-- `ttl_ms` 0 releases the lease. `own_epoch` is '' for one who takes it. The holder sets the clock to
-- `clock_ms`; one who takes the lease says '', or where the clock has stopped, which takes it from a holder
-- that is gone.
-- Returns the epoch, or '' when another holds the lease or a newer epoch has begun; and the server's id.
local server = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local other, last = redis.call('GET', batcher), redis.call('GET', epoch)
if other and other ~= holder then
  if own_epoch ~= '' or clock_ms == '' or redis.call('GET', clock) ~= clock_ms then return {'', server} end
end
if ttl_ms == '0' then
  redis.call('DEL', batcher)
  return {'', server}
end
if own_epoch == '' then
  local now = redis.call('TIME')
  own_epoch = string.format('%.0f', now[1] * 1000000 + now[2])
  if last and tonumber(last) >= tonumber(own_epoch) then
    own_epoch = string.format('%.0f', tonumber(last) + 1)
  end
  redis.call('SET', epoch, own_epoch)
  redis.call('INCR', clock) -- it goes on: others that saw it stopped do not take the lease from this one
elseif last ~= own_epoch then
  return {'', server}
else
  redis.call('SET', clock, clock_ms)
end
redis.call('SET', batcher, holder, 'PX', ttl_ms)
return {own_epoch, server}

--- heartbeat
-- needs: lib/heartbeat
-- Heartbeat of a process that is no worker.
-- KEYS process, processes
-- ARGV member, ttl_ms, ...
-- `process`: its hash. `member`: kind:name. More arguments: field, value of the hash.
return write_heartbeat(process, processes, member, ttl_ms, {unpack(ARGV, first_arg)})

--- publish_pool
-- needs: lib/now
-- Write what the active batcher of a pool says of it to the directory. Pools that are silent for `ttl_s`
-- leave.
-- KEYS pools, pool_entries
-- ARGV pool, entry, address, silent_s, ttl_s
-- `entry`: a map whose field `a` is `address`, of the pool's broker.
-- Returns '', or the address of another broker with a pool of this name that wrote within `silent_s`.
local now_s = now_ms() / 1000
local seen_s, other = redis.call('ZSCORE', pools, pool), redis.call('HGET', pool_entries, pool)
if seen_s and other and now_s - tonumber(seen_s) < tonumber(silent_s) then
  local theirs = cmsgpack.unpack(other).a
  if theirs ~= address then return theirs end
end
redis.call('HSET', pool_entries, pool, entry)
redis.call('ZADD', pools, now_s, pool)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', pools, '-inf', now_s - ttl_s)) do
  redis.call('HDEL', pool_entries, gone)
  redis.call('ZREM', pools, gone)
end
redis.call('EXPIRE', pools, ttl_s)
redis.call('EXPIRE', pool_entries, ttl_s)
return ''

--- drain
-- Ask a worker to drain: it learns so with its next heartbeat. A repeated call changes nothing.
-- KEYS worker
-- Returns {its state, its number of rows}, or nothing when there is no such worker.
if redis.call('EXISTS', worker) == 0 then return false end
redis.call('HSET', worker, 'drain', 1)
return redis.call('HMGET', worker, 'state', 'rows')

--- seal
-- needs: lib/sealed
-- Seal an incarnation: its heartbeat is deleted, and nothing can be appended to its streams any more.
-- It stands in the set `sealed` until a batcher has removed it.
-- KEYS log, reports, worker, workers, sealed
-- ARGV incarnation, why, ttl_ms
-- `why`: 'died', 'drained' or 'unreadable'. `ttl_ms`: of the set.
-- Returns 1, or 0 when its log does not exist.
redis.call('DEL', worker)
redis.call('ZREM', workers, incarnation)
for _, stream in ipairs({log, reports}) do
  if sealed_or_missing(stream) == 'MISSING' then redis.call('DEL', stream) end -- somebody else's, if any
end
if sealed_or_missing(log) == 'MISSING' then return 0 end
for _, stream in ipairs({log, reports}) do
  if sealed_or_missing(stream) ~= 'SEALED' then
    redis.call('XADD', stream, SEAL, 'sealed', incarnation, 'why', why)
  end
end
redis.call('SADD', sealed, incarnation)
redis.call('PEXPIRE', sealed, ttl_ms)
return 1

--- read_requests
-- Read requests: some fields of each, and the tokens in its string. A key of another type is read as absent.
-- KEYS ...
-- ARGV which, num_fields, ...
-- Keys: request, tokens of each. `which`: 'live' for the tokens of live requests alone, or 'all'.
-- More arguments: the names of the fields; then for each request the first byte of its tokens, '' for none of
-- them. Of one that has ended all are read.
-- Returns for each request its fields, then its tokens.
local first_offset = first_arg + num_fields

local function read_tokens(request, tokens, offset)
  local ended = redis.pcall('HEXISTS', request, 'terminal') == 1
  if offset == '' or (ended and which == 'live') then return '' end
  local records = redis.pcall('GETRANGE', tokens, ended and 0 or offset, -1)
  return type(records) == 'string' and records or ''
end

local answer = {}
for i = 1, #KEYS / 2 do
  local request, tokens = KEYS[2 * i - 1], KEYS[2 * i]
  local fields = redis.pcall('HMGET', request, unpack(ARGV, first_arg, first_offset - 1))
  if fields.err then
    fields = {}
    for j = 1, tonumber(num_fields) do fields[j] = false end
  end
  fields[num_fields + 1] = read_tokens(request, tokens, ARGV[first_offset + i - 1])
  answer[i] = fields
end
return answer

--- change_adapters
-- Change the registry of a pool's adapters if it is as the caller has read it, and give it a new version:
-- gateways, batchers and workers read it again.
-- KEYS adapters
-- ARGV version, ttl_ms, num_removed, ...
-- `version`: '' where there is no registry. More arguments: fields that are removed; then name, value of
-- those that are set.
-- Returns 1, or 0 when somebody else has changed it.
if (redis.call('HGET', adapters, 'version') or '') ~= version then return 0 end
local first_set = first_arg + tonumber(num_removed)
for i = first_arg, first_set - 1 do redis.call('HDEL', adapters, ARGV[i]) end
for i = first_set, #ARGV, 2 do redis.call('HSET', adapters, ARGV[i], ARGV[i + 1]) end
local time = redis.call('TIME')
redis.call('HSET', adapters, 'version', time[1] .. '.' .. time[2])
redis.call('PEXPIRE', adapters, ttl_ms)
return 1

--- change_key
-- Write the record of an API key if it is still what the caller has read, and give all of them a new version:
-- gateways read the keys again.
-- KEYS api_keys
-- ARGV key_id, old, new, max_keys, ...
-- `old` is '' for a new key. More arguments: ids of keys that are deleted, as they have counted no more for
-- long.
-- Returns 1, 0 when the record is another one, or -1 when there are `max_keys` already.
if (redis.call('HGET', api_keys, key_id) or '') ~= old then return 0 end
for i = first_arg, #ARGV do redis.call('HDEL', api_keys, ARGV[i]) end
if old == '' and redis.call('HLEN', api_keys) > tonumber(max_keys) then return -1 end
local time = redis.call('TIME')
redis.call('HSET', api_keys, key_id, new, 'version', time[1] .. '.' .. time[2])
return 1
