--- lib/pictures
-- needs: lib/now
-- The sorted set `pictures` has a member for each picture: its digest and its size, by when it expires.
local LINGER_MS = 30000 -- of a picture that no request holds: one may be on its way to its admission

local function expire_picture(pictures, picture, digest, at_ms)
  redis.call('PEXPIREAT', picture, at_ms)
  redis.call('ZADD', pictures, at_ms, digest .. ' ' .. redis.call('STRLEN', picture))
  local last = redis.call('ZREVRANGE', pictures, 0, 0, 'WITHSCORES')
  redis.call('PEXPIREAT', pictures, last[2])
end

local function last_holder_ms(holders, now)
  redis.call('ZREMRANGEBYSCORE', holders, '-inf', now)
  return tonumber(redis.call('ZREVRANGE', holders, 0, 0, 'WITHSCORES')[2] or '0')
end

--- keep_picture
-- needs: lib/pictures
-- Keep a picture's bytes until a request holds it, for a moment.
-- The sum of all sizes is kept while pictures come: of 10,000 it would take 35 ms each time. It may be too
-- high, as where the broker has lost a picture: before one is refused, they are counted anew.
-- KEYS pictures, picture_bytes, picture, picture_holders
-- ARGV digest, content, max_bytes
-- `content` is '' to ask whether the bytes are there. `max_bytes`: of all pictures of the pool.
-- Returns 'kept', 'missing' where no content is given and none is there, or 'full'.
local function sum_of(members)
  local sum = 0
  for _, member in ipairs(members) do sum = sum + tonumber(string.match(member, '%d+$')) end
  return sum
end

local now = now_ms()
local expired = redis.call('ZRANGEBYSCORE', pictures, '-inf', now)
if #expired > 0 then
  redis.call('ZREMRANGEBYSCORE', pictures, '-inf', now)
  if redis.call('EXISTS', picture_bytes) == 1 then redis.call('INCRBY', picture_bytes, -sum_of(expired)) end
end
if redis.call('EXISTS', picture) == 0 then
  if content == '' then return 'missing' end
  local most = tonumber(max_bytes) - #content
  local total = tonumber(redis.call('GET', picture_bytes) or most + 1)
  if total > most then total = sum_of(redis.call('ZRANGE', pictures, 0, -1)) end
  if total > most then return 'full' end
  redis.call('SET', picture, content)
  redis.call('SET', picture_bytes, total + #content, 'PX', LINGER_MS)
end
expire_picture(pictures, picture, digest, math.max(now + LINGER_MS, last_holder_ms(picture_holders, now)))
return 'kept'

--- hold_pictures
-- needs: lib/pictures
-- Keep the bytes of a request's pictures for `life_ms`, or until the request lets go of them.
-- KEYS pictures, ...
-- ARGV request_id, life_ms, ...
-- More keys: the picture and its holders, for each picture. More arguments: the digest of each.
-- Returns 1, or 0 if one of them is not there.
for i = first_key, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[i]) == 0 then return 0 end
end
local now = now_ms()
for i = first_key, #KEYS, 2 do
  local picture, holders, digest = KEYS[i], KEYS[i + 1], ARGV[first_arg + (i - first_key) / 2]
  redis.call('ZADD', holders, now + life_ms, request_id)
  local last_ms = last_holder_ms(holders, now)
  redis.call('PEXPIREAT', holders, last_ms)
  expire_picture(pictures, picture, digest, last_ms)
end
return 1

--- let_go_pictures
-- needs: lib/pictures
-- A request that has ended holds its pictures no more.
-- KEYS pictures, ...
-- ARGV request_id, ...
-- More keys and arguments as in `hold_pictures`.
-- Returns nothing of use.
local now = now_ms()
for i = first_key, #KEYS, 2 do
  local picture, holders, digest = KEYS[i], KEYS[i + 1], ARGV[first_arg + (i - first_key) / 2]
  redis.call('ZREM', holders, request_id)
  local last_ms = last_holder_ms(holders, now)
  if redis.call('EXISTS', picture) == 1 then
    expire_picture(pictures, picture, digest, math.max(now + LINGER_MS, last_ms))
  end
end
return 1
