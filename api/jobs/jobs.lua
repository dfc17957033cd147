--- begin_validation
-- Note in a job that a gateway validates it: the note of a gateway that dies stays. A job with `choices` was
-- validated before, and has no notes that count.
-- KEYS job
-- ARGV validates, gateway, gateways
-- `validates`: how the fields of notes begin. `gateways`: how the names of gateways' hashes begin.
-- Returns the dead gateways with a note.
if redis.call('EXISTS', job) == 0 or redis.call('HEXISTS', job, 'choices') == 1 then return {} end
local dead, fields = {}, redis.call('HGETALL', job)
for i = 1, #fields, 2 do
  local other = fields[i]:sub(1, #validates) == validates and fields[i]:sub(#validates + 1)
  if other and other ~= gateway then
    local state = redis.call('HGET', gateways .. other, 'state')
    if state == 'died' or redis.call('EXISTS', gateways .. other) == 0 then dead[#dead + 1] = other end
  end
end
redis.call('HSET', job, validates .. gateway, 1)
return dead

--- claim_jobs
-- Claim the jobs of a gateway without a heartbeat, or that its launcher says has died. A consumer that holds
-- none is deleted.
-- KEYS submit, gateway
-- ARGV group, dead, claimer, max_jobs
-- `gateway`: the hash of the dead gateway. `dead`, `claimer`: its name, and that of the claiming gateway.
-- Returns the ids of the entries claimed.
if redis.call('EXISTS', gateway) == 1 and redis.call('HGET', gateway, 'state') ~= 'died' then return {} end
local pending = redis.call('XPENDING', submit, group, '-', '+', max_jobs, dead)
if #pending == 0 then
  redis.call('XGROUP', 'DELCONSUMER', submit, group, dead)
  return {}
end
local claim = {'XCLAIM', submit, group, claimer, 0}
for _, entry in ipairs(pending) do claim[#claim + 1] = entry[1] end
claim[#claim + 1] = 'JUSTID'
return redis.call(unpack(claim))

--- reply
-- needs: lib/jobs, lib/webhooks
-- Send the new frames of a job, each once, whichever gateway comes first; and store its answer, once. With
-- the answer the event of its webhook is due.
-- KEYS job, reply, result, jobs, submit, webhooks, ...
-- ARGV channel, max_entries, ttl_ms, request_ttl_ms, job_ttl_ms, answer, first, num_heard, event, job_id,
--  state, status, reason, error, dead_ttl_ms, max_dead, max_ended, ...
-- More keys: of the requests. With the answer they expire in `request_ttl_ms`, the job and the stream `reply`
-- in `ttl_ms`; a job that goes on expires in `job_ttl_ms`. `max_entries` is '0' without a stream. With the
-- answer, `state` to `error` say how the job has ended; the last three bound the records of such jobs.
-- More arguments: frames in their order, from the number `first` on; the channel has heard `num_heard`.
-- The last frame comes with the answer, so it is new: of a job that fails another gateway has fewer.
-- Returns 0, or -2, with nothing done, when frames before these are missing: the broker has lost them, and
-- all are to be offered.
first, num_heard = tonumber(first), tonumber(num_heard)
local function num_sent(target) return tonumber(redis.call('HGET', job, target .. ':0') or '0') end
local in_channel, in_stream = channel ~= '' and num_sent(channel), max_entries ~= '0' and num_sent('stream')
if math.min(in_channel or first, in_stream or first) < first then return -2 end

local is_end = answer ~= '' and redis.call('HEXISTS', job, 'last') == 0
if is_end then
  redis.call('HSET', job, 'last', #ARGV >= first_arg and ARGV[#ARGV] or answer, 'status', status)
  redis.call('PEXPIRE', job, ttl_ms)
  redis.call('SET', result, answer, 'PX', ttl_ms)
  for i = first_key, #KEYS do redis.call('PEXPIRE', KEYS[i], request_ttl_ms) end
  local ending = {'status', status, 'reason', reason, 'error', error}
  end_job(jobs, submit, job_id, state, ending, tonumber(dead_ttl_ms), tonumber(max_dead), tonumber(ttl_ms),
    tonumber(max_ended))
  local webhook = redis.call('HGET', job, 'webhook')
  if webhook then
    note_end(webhooks, webhook, event)
    redis.call('HDEL', job, 'webhook')
  end
end

for i = first_arg, #ARGV do
  local number, is_last = first + i - first_arg, is_end and i == #ARGV
  if in_channel and (number >= in_channel or is_last) and number >= num_heard then
    redis.call('PUBLISH', channel, ARGV[i])
  end
  if in_stream and (number >= in_stream or is_last) then
    local id = redis.call('HINCRBY', job, 'entries', 1) .. '-0'
    redis.pcall('XADD', reply, 'MAXLEN', max_entries, id, 'frame', ARGV[i])
  end
end
local number = first + #ARGV - first_arg + 1
if in_channel then redis.call('HSET', job, channel .. ':0', math.max(in_channel, number)) end
if in_stream then redis.call('HSET', job, 'stream:0', math.max(in_stream, number)) end
if redis.call('HEXISTS', job, 'last') == 0 then redis.call('PEXPIRE', job, job_ttl_ms) end
if max_entries ~= '0' then redis.call('PEXPIRE', reply, ttl_ms) end
return 0

--- cancel_job
-- needs: lib/jobs
-- Cancel a job. One that is not known yet is marked, as its entry may still come. The entries of a scheduled
-- one are submitted, so that it ends at once.
-- KEYS job, jobs, submit
-- ARGV tenant, mark_ttl_ms, job_id
-- `tenant` whose job it must be, or '' for any.
-- Returns as how many requests it was admitted, or -1 when it has ended or is another tenant's.
local is_new = redis.call('EXISTS', job) == 0
if redis.call('HEXISTS', job, 'last') == 1 then return -1 end
if tenant ~= '' and not is_new and redis.call('HGET', job, 'tenant') ~= tenant then return -1 end
redis.call('HSET', job, 'cancel', 1)
if is_new then
  if tenant ~= '' then redis.call('HSET', job, 'tenant', tenant) end
  local is_known = redis.call('ZSCORE', jobs .. ':live', job_id)
  redis.call('PEXPIRE', job, is_known and JOB_TTL_MS or mark_ttl_ms)
end
if redis.call('ZSCORE', jobs .. ':scheduled', job_id) then submit_entries(jobs, submit, job_id, false) end
return tonumber(redis.call('HGET', job, 'choices') or '0')

--- create_batch
-- Keep a new batch, which has no lease; one that is there already stays as it is. Of too many, the oldest
-- that has ended leaves.
-- KEYS batch, batches, live_batches
-- ARGV member, made_ms, deadline_ms, ttl_ms, max_batches, ...
-- More arguments: name, value of each field.
-- Returns `new`, `known`, or `full` when there are `max_batches` that have not ended.
if redis.call('EXISTS', batch) == 1 then return 'known' end
if redis.call('ZCARD', live_batches) >= tonumber(max_batches) then return 'full' end
for i = first_arg, #ARGV, 2 do redis.call('HSET', batch, ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', batch, ttl_ms)
redis.call('ZADD', batches, made_ms, member)
redis.call('ZADD', live_batches, deadline_ms, member)
local surplus = redis.call('ZCARD', batches) - tonumber(max_batches)
local oldest = surplus > 0 and redis.call('ZRANGE', batches, 0, -1) or {}
for _, other in ipairs(oldest) do
  if surplus > 0 and not redis.call('ZSCORE', live_batches, other) then
    redis.call('ZREM', batches, other)
    surplus = surplus - 1
  end
end
redis.call('PEXPIRE', batches, ttl_ms)
redis.call('PEXPIRE', live_batches, ttl_ms)
return 'new'

--- claim_batch
-- needs: lib/now
-- Become the one writer of a batch that nobody writes.
-- KEYS batch, live_batches
-- ARGV member, lease_ms
-- Returns the writer's epoch, or 0 when the batch has another writer, or has ended.
if redis.call('HEXISTS', batch, 'record') == 0 then -- the broker has lost it
  redis.call('ZREM', live_batches, member)
  return 0
end
if not redis.call('ZSCORE', live_batches, member) then return 0 end
local present_ms = now_ms()
if tonumber(redis.call('HGET', batch, 'leased_until_ms') or '0') > present_ms then return 0 end
redis.call('HSET', batch, 'leased_until_ms', present_ms + tonumber(lease_ms))
return redis.call('HINCRBY', batch, 'epoch', 1)

--- write_batch
-- needs: lib/webhooks
-- Write fields of a batch, and renew its lease; only its newest writer may. With the last write the event of
-- its webhook is due.
-- KEYS batch, batches, live_batches, webhooks
-- ARGV member, epoch, lease_ms, ttl_ms, ended, last_part, ...
-- `ended` is '1' with the last write. A `lease_ms` of 0 gives the batch up. `last_part`: the field of the
-- last part that was written, or ''. More arguments: name, value of each field.
-- Returns 'lost' when there is a newer writer, 'hole' when the broker has lost the last part, and nothing is
-- written; 'cancelled' when a client has cancelled it, else 'live'.
if redis.call('HGET', batch, 'epoch') ~= epoch then return 'lost' end
if last_part ~= '' and redis.call('HEXISTS', batch, last_part) == 0 then return 'hole' end
for i = first_arg, #ARGV, 2 do redis.call('HSET', batch, ARGV[i], ARGV[i + 1]) end
redis.call('HSET', batch, 'leased_until_ms', lease_ms == '0' and 0 or now_ms() + tonumber(lease_ms))
for _, key in ipairs({batch, batches, live_batches}) do redis.call('PEXPIRE', key, ttl_ms) end
if ended == '1' and redis.call('ZREM', live_batches, member) == 1 then
  local webhook, status = unpack(redis.call('HMGET', batch, 'webhook', 'status'))
  if webhook then note_end(webhooks, webhook, status) end
end
return redis.call('HEXISTS', batch, 'cancelling_at') == 1 and 'cancelled' or 'live'

--- cancel_batch
-- Ask the writer of a batch to end it.
-- KEYS batch, live_batches
-- ARGV member, cancelling_at
-- Returns 1, or 0 when the batch has ended.
if not redis.call('ZSCORE', live_batches, member) then return 0 end
redis.call('HSETNX', batch, 'cancelling_at', cancelling_at)
return 1
