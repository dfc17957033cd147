-- Admit a request: check the count and bytes of the queue, then append one entry.
-- The entry carries what the pool's clock showed, if there is one: the request's deadline counts from there.
-- KEYS requests, requests:bytes, request, clock
-- ARGV payload, max count, max bytes, digest, channel, gateway, records of a token; then the answer that this
-- request begins, or ''
-- Returns {'admitted', entry id}, {'attached'}, {'conflict'}, {'count', n} or {'bytes', n}.
local digest = redis.call('HGET', KEYS[3], 'digest')
if digest then return {digest == ARGV[4] and 'attached' or 'conflict'} end
local count = redis.call('XLEN', KEYS[1])
if count >= tonumber(ARGV[2]) then return {'count', count} end
local bytes = count == 0 and 0 or tonumber(redis.call('GET', KEYS[2]) or '0')
if bytes + #ARGV[1] > tonumber(ARGV[3]) then return {'bytes', bytes} end
local entry, clock = {'generate', ARGV[1]}, redis.call('GET', KEYS[4])
if clock then entry[3], entry[4] = 'clock', clock end
local id = redis.call('XADD', KEYS[1], '*', unpack(entry))
redis.call('SET', KEYS[2], bytes + #ARGV[1])
redis.call('HSET', KEYS[3], 'digest', ARGV[4], 'channel', ARGV[5], 'gateway', ARGV[6], 'entry', id,
  'attempt', 0, 'base', 0, 'crash_count', 0, 'width', ARGV[7])
if ARGV[8] and ARGV[8] ~= '' then redis.call('HSET', KEYS[3], 'answer', ARGV[8]) end
return {'admitted', id}
