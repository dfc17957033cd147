--- lib/webhooks
-- needs: lib/now
-- Events of webhooks. `webhooks` is a sorted set: event → when it is sent next, in ms. An event has a hash,
-- whose name is that name, a colon and the event.
-- `webhook`, of a request, job or batch: `place number event`, a line end, and to whom the event goes. It is
-- due once all `number` requests of an answer have ended, each at a place of its own. Until its hash expires,
-- an event is due once, whoever notes the ends again.
local EVENT_TTL_MS = 15 * 86400000
local function note_end(webhooks, webhook, reason)
  local place, number, id, target = string.match(webhook, '^(%d+) (%d+) (%S+)\n(.*)$')
  if not id then return end -- somebody else has written it
  local event = webhooks .. ':' .. id
  if redis.call('HEXISTS', event, 'made_ms') == 1 then return end
  redis.call('HSET', event, 'webhook', target, 'end:' .. place, reason)
  redis.call('PEXPIRE', event, EVENT_TTL_MS)
  if redis.call('HLEN', event) - 1 < tonumber(number) then return end
  local made_ms = now_ms()
  redis.call('HSET', event, 'made_ms', made_ms)
  redis.call('ZADD', webhooks, made_ms, id)
  redis.call('PEXPIRE', webhooks, EVENT_TTL_MS)
end

--- claim_webhooks
-- needs: lib/now
-- Claim events that are due. Whoever claims one sends it, and settles it; after `lease_ms` it is due again.
-- KEYS webhooks
-- ARGV max_events, lease_ms
-- Returns for each event its id, then the fields of its hash. `attempt` numbers its claims.
local claimed = {}
local present_ms = now_ms()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', webhooks, '-inf', present_ms, 'LIMIT', 0, max_events)) do
  local event = webhooks .. ':' .. id
  if redis.call('EXISTS', event) == 0 then
    redis.call('ZREM', webhooks, id)
  else
    redis.call('HINCRBY', event, 'attempt', 1)
    redis.call('ZADD', webhooks, present_ms + tonumber(lease_ms), id)
    claimed[#claimed + 1] = {id, redis.call('HGETALL', event)}
  end
end
return claimed

--- settle_webhook
-- needs: lib/now
-- Write what became of an attempt. An event that was delivered leaves the queue, and nobody's secret stays;
-- one that failed is due again, or is dead: of too many, those that are dead for longest leave.
-- KEYS webhooks, dead_webhooks
-- ARGV event_id, attempt, type, outcome, said, wait_ms, ttl_ms, max_dead
-- `type` that the receiver was sent, or ''; each attempt sends the same.
-- `outcome`: 'delivered', 'failed' or 'dead'. `said`: what the receiver answered. `wait_ms` until the next
-- attempt of one that failed; `ttl_ms` of one that was delivered or is dead.
-- Returns 1, or 0 when a later attempt has begun.
local event = webhooks .. ':' .. event_id
if redis.call('HGET', event, 'attempt') ~= attempt then return 0 end
local present_ms = now_ms()
redis.call('HSET', event, 'said', said, 'settled_ms', present_ms, 'state', outcome, 'type', type)
if outcome == 'failed' then
  redis.call('HINCRBY', event, 'failures', 1)
  redis.call('ZADD', webhooks, present_ms + tonumber(wait_ms), event_id)
  return 1
end
redis.call('ZREM', webhooks, event_id)
redis.call('PEXPIRE', event, ttl_ms)
if outcome ~= 'dead' then
  redis.call('HDEL', event, 'webhook')
  return 1
end
redis.call('HINCRBY', event, 'failures', 1)
redis.call('ZADD', dead_webhooks, present_ms, event_id)
redis.call('PEXPIRE', dead_webhooks, ttl_ms)
local gone = redis.call('ZRANGEBYSCORE', dead_webhooks, '-inf', present_ms - tonumber(ttl_ms))
local surplus = redis.call('ZCARD', dead_webhooks) - #gone - tonumber(max_dead)
if surplus > 0 then gone = redis.call('ZRANGE', dead_webhooks, 0, #gone + surplus - 1) end
for _, other in ipairs(gone) do
  redis.call('ZREM', dead_webhooks, other)
  redis.call('DEL', webhooks .. ':' .. other)
end
return 1

--- retry_webhook
-- needs: lib/webhooks
-- Send an event that waits or is dead at once, and try for as long as if it were new.
-- KEYS webhooks, dead_webhooks
-- ARGV event_id
-- Returns 1, or 0 when there is no such event, or it was delivered.
local event = webhooks .. ':' .. event_id
local is_dead = redis.call('ZREM', dead_webhooks, event_id) == 1
if not is_dead and not redis.call('ZSCORE', webhooks, event_id) then return 0 end
if redis.call('HEXISTS', event, 'webhook') == 0 then return 0 end
local present_ms = now_ms()
redis.call('HSET', event, 'failures', 0, 'state', 'waiting')
redis.call('PEXPIRE', event, EVENT_TTL_MS)
redis.call('ZADD', webhooks, present_ms, event_id)
redis.call('PEXPIRE', webhooks, EVENT_TTL_MS)
return 1
