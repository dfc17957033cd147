--- lib/jobs
-- needs: lib/now
-- Records of jobs, for people. `jobs` is how the names of their keys begin. Each job is in one of the sorted
-- sets `jobs:live`, `jobs:scheduled`, `jobs:dead`, `jobs:ended`. It has a hash `jobs:record:{id}`, and until
-- it is done a hash `jobs:entries:{id}`: where its answer goes -> its entry. While the job is live that is an
-- id in `submit`; of a scheduled or dead job, which has left `submit`, it is the packed fields.
local JOB_SETS = {'live', 'scheduled', 'dead', 'ended'}
local JOB_TTL_MS, JOB_SETS_TTL_MS = 7 * 86400000, 60 * 86400000

-- Have a job in one set alone, and keep its record for `ttl_ms`.
local function move_job(jobs, id, set, at_ms, ttl_ms)
  for _, other in ipairs(JOB_SETS) do
    if other ~= set then redis.call('ZREM', jobs .. ':' .. other, id) end
  end
  redis.call('ZADD', jobs .. ':' .. set, at_ms, id)
  redis.call('PEXPIRE', jobs .. ':' .. set, JOB_SETS_TTL_MS)
  redis.call('PEXPIRE', jobs .. ':record:' .. id, ttl_ms)
  redis.call('PEXPIRE', jobs .. ':entries:' .. id, ttl_ms)
end

-- Delete members that are older than `ttl_ms`, and of more than `most` the oldest, with all that is kept of
-- them.
local function trim_jobs(jobs, set, ttl_ms, most)
  local key = jobs .. ':' .. set
  local num_old = redis.call('ZCOUNT', key, '-inf', now_ms() - ttl_ms)
  local surplus = math.max(num_old, redis.call('ZCARD', key) - most)
  for _, id in ipairs(surplus > 0 and redis.call('ZRANGE', key, 0, surplus - 1) or {}) do
    redis.call('ZREM', key, id)
    redis.call('DEL', jobs .. ':record:' .. id, jobs .. ':entries:' .. id)
  end
end

-- Keep the fields of a job's entries, which leave `submit`.
local function keep_entries(jobs, submit, id)
  local entries = redis.call('HGETALL', jobs .. ':entries:' .. id)
  for i = 1, #entries, 2 do
    local found = redis.call('XRANGE', submit, entries[i + 1], entries[i + 1])[1]
    if found then
      redis.call('HSET', jobs .. ':entries:' .. id, entries[i], cmsgpack.pack(found[2]))
    else
      redis.call('HDEL', jobs .. ':entries:' .. id, entries[i])
    end
  end
end

-- Put a job's kept entries into `submit`, where others of it may be still, with the fields that say something.
-- A scheduled job remembers its first entry; a dead one is new.
local function submit_entries(jobs, submit, id, is_new)
  local entries = redis.call('HGETALL', jobs .. ':entries:' .. id)
  local first_entry = redis.call('HGET', jobs .. ':record:' .. id, 'first_entry') or ''
  for i = 1, #entries, 2 do
    if not string.match(entries[i + 1], '^%d+%-%d+$') then
      local kept, named = cmsgpack.unpack(entries[i + 1]), {}
      for j = 1, #kept, 2 do named[kept[j]] = kept[j + 1] end
      named.first_entry = not is_new and first_entry ~= '' and first_entry or nil
      local fields = {}
      for _, name in ipairs({'job', 'api_key', 'first_entry'}) do
        if named[name] then
          fields[#fields + 1] = name
          fields[#fields + 1] = named[name]
        end
      end
      redis.call('HSET', jobs .. ':entries:' .. id, entries[i], redis.call('XADD', submit, '*', unpack(fields)))
    end
  end
  move_job(jobs, id, 'live', now_ms(), JOB_TTL_MS)
end

-- Note the end of a job that has a record. One that is dead keeps its entries: it may be tried again.
local function end_job(jobs, submit, id, state, fields, dead_ttl_ms, max_dead, ended_ttl_ms, max_ended)
  local record = jobs .. ':record:' .. id
  if redis.call('EXISTS', record) == 0 then return end
  local ended_ms = now_ms()
  redis.call('HSET', record, 'ended_ms', ended_ms, 'state', state, unpack(fields))
  if state == 'dead' then
    keep_entries(jobs, submit, id)
    move_job(jobs, id, 'dead', ended_ms, dead_ttl_ms)
    trim_jobs(jobs, 'dead', dead_ttl_ms, max_dead)
    return
  end
  redis.call('DEL', jobs .. ':entries:' .. id)
  move_job(jobs, id, 'ended', ended_ms, ended_ttl_ms)
  trim_jobs(jobs, 'ended', ended_ttl_ms, max_ended)
end

--- register_job
-- needs: lib/jobs
-- Register a job, or find that it runs or has ended, and keep its record. Of an ended job the last frame is
-- sent again. One that may not run yet leaves `submit` until its time.
-- KEYS job, reply, result, jobs, submit
-- ARGV digest, tenant, webhook, channel, in_stream, reply_ttl_ms, job_id, entry_id, address, not_before_ms,
--  group, max_scheduled, max_addresses, ...
-- `in_stream` is '1' where the stream `reply` gets the frames, too. `tenant` of its API key, or ''. `webhook`
-- as in `lib/webhooks`, or ''; the first one counts. `entry_id` is '' where no record is kept. `address`:
-- where its answer goes. `not_before_ms` is 0 of a job that is not to wait. More arguments: name, value of
-- each field of the record.
-- Returns 'live', 'ended', 'conflict', 'scheduled', or 'full' when `max_scheduled` jobs wait for their time,
-- or this one with the entries of `max_addresses`.
local known, last, owner = unpack(redis.call('HMGET', job, 'digest', 'last', 'tenant'))
if not known and owner and owner ~= tenant then redis.call('DEL', job) end -- another tenant's cancel
if known and known ~= digest then return 'conflict' end
if last then
  if channel ~= '' then redis.call('PUBLISH', channel, last) end
  if in_stream == '1' and redis.call('EXISTS', reply) == 0 then
    redis.call('XADD', reply, '1-0', 'frame', last)
    redis.call('PEXPIRE', reply, reply_ttl_ms)
  end
  return 'ended'
end
if not known then redis.call('DEL', result, reply) end -- the error of an attempt that was refused
redis.call('HSET', job, 'digest', digest)
if tenant ~= '' then redis.call('HSET', job, 'tenant', tenant) end
if webhook ~= '' then redis.call('HSETNX', job, 'webhook', webhook) end
redis.call('PEXPIRE', job, JOB_TTL_MS)
if entry_id == '' then return 'live' end

local record, entries = jobs .. ':record:' .. job_id, jobs .. ':entries:' .. job_id
local present_ms, due_ms = now_ms(), tonumber(not_before_ms)
local waits = due_ms > present_ms and redis.call('HEXISTS', job, 'cancel') == 0
local is_new = redis.call('HEXISTS', entries, address) == 0
if is_new and redis.call('HLEN', entries) >= tonumber(max_addresses) then
  return waits and 'full' or 'live'
end
local live_since = redis.call('ZSCORE', jobs .. ':live', job_id)
local is_scheduled = redis.call('ZSCORE', jobs .. ':scheduled', job_id)
if waits and not is_scheduled and redis.call('ZCARD', jobs .. ':scheduled') >= tonumber(max_scheduled) then
  if not live_since then redis.call('DEL', job) end
  return 'full'
end
if not live_since and not is_scheduled then redis.call('DEL', record, entries) end
for i = first_arg, #ARGV, 2 do redis.call('HSETNX', record, ARGV[i], ARGV[i + 1]) end
if not waits then
  if is_scheduled then submit_entries(jobs, submit, job_id, false) end
  redis.call('HSET', entries, address, entry_id)
  move_job(jobs, job_id, 'live', live_since or present_ms, JOB_TTL_MS)
  trim_jobs(jobs, 'live', JOB_TTL_MS, math.huge)
  return 'live'
end
local found = redis.call('XRANGE', submit, entry_id, entry_id)[1]
if not found then return 'scheduled' end -- another gateway has scheduled it
redis.call('HSET', entries, address, cmsgpack.pack(found[2]))
redis.call('XACK', submit, group, entry_id)
redis.call('XDEL', submit, entry_id)
move_job(jobs, job_id, 'scheduled', due_ms, due_ms - present_ms + JOB_TTL_MS)
redis.call('PEXPIRE', job, due_ms - present_ms + JOB_TTL_MS)
return 'scheduled'

--- release_jobs
-- needs: lib/jobs
-- Put scheduled jobs whose time has come into `submit`, while that has room.
-- KEYS jobs, submit
-- ARGV max_jobs, submit_limit
-- Returns how many.
local room = math.min(tonumber(max_jobs), tonumber(submit_limit) - redis.call('XLEN', submit))
if room <= 0 then return 0 end
local due = redis.call('ZRANGEBYSCORE', jobs .. ':scheduled', '-inf', now_ms(), 'LIMIT', 0, room)
for _, id in ipairs(due) do submit_entries(jobs, submit, id, false) end
return #due

--- retry_job
-- needs: lib/jobs
-- Submit a dead job again, with its id, as if it were new: whatever is left of its first run is deleted.
-- KEYS jobs, job, result, reply, submit, ...
-- ARGV job_id
-- More keys: of its requests.
-- Returns 1, or 0 when the job is not dead.
if not redis.call('ZSCORE', jobs .. ':dead', job_id) then return 0 end
if redis.call('HLEN', jobs .. ':entries:' .. job_id) == 0 then return 0 end
redis.call('DEL', job, result, reply, unpack(KEYS, first_key))
local record = jobs .. ':record:' .. job_id
redis.call('HDEL', record, 'first_entry', 'not_before_ms', 'state', 'ended_ms', 'status', 'reason', 'error')
redis.call('HINCRBY', record, 'retries', 1)
submit_entries(jobs, submit, job_id, true)
return 1
