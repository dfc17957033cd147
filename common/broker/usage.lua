--- lib/usage
-- needs: lib/now
-- What keys, tenants and models have used. The field `account` of a request's hash says who pays for it, and
-- `counted` how many tokens of its answer are counted: whoever commits more counts the difference alone. The
-- prompt is counted with the first token. A request of a key with a budget sets its prompt and first token
-- (of a beam search, which has none before its end, all that it may make) aside until then: the field
-- `pending` says how much.
-- `usage`, here and below: how the names of all keys of usage begin.
-- A script makes these functions only where it counts: to make them takes longer than to append a flush.
local function load_usage()
  local HOUR_TTL_S, MONTH_TTL_S = 90 * 86400, 400 * 86400
  local MAX_FIELDS = 60000 -- of one hour or month
  local OTHERS = '\n*\n*' -- pays for those that are too many
  local MOST_LEFT = 2147483647

  -- Returns nil for what is no account: somebody else has written it.
  local function read_account(text)
    local prompt, first, budget, owner
      = string.match(text, '^(%d+) (%d+) %d+ %d+ %d+ (%d+) %d+\n(.*)$')
    if not owner then return nil end
    return {
      prompt = tonumber(prompt),
      first = tonumber(first),
      budget = tonumber(budget),
      owner = owner,
      key = string.match(owner, '^[^\n]*'),
    }
  end

  -- Year and month (UTC) of a Unix time, as 2026-11 (Howard Hinnant's `civil_from_days`).
  local function month_of(time_s)
    local days = math.floor(time_s / 86400) + 719468
    local era = math.floor(days / 146097)
    local day_of_era = days - era * 146097
    local leap_days = math.floor(day_of_era / 1460) - math.floor(day_of_era / 36524)
      + math.floor(day_of_era / 146096)
    local year = math.floor((day_of_era - leap_days) / 365)
    local day_of_year = day_of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
    local month = math.floor((5 * day_of_year + 2) / 153) + 3
    if month > 12 then month, year = month - 12, year + 1 end
    return string.format('%04d-%02d', year + era * 400, month)
  end

  -- The hour by its number, and the month, in which this script runs.
  local hour, month
  local function read_clock()
    if month then return end
    local time_s = now_ms() / 1000
    hour, month = string.format('%d', math.floor(time_s / 3600)), month_of(time_s)
  end

  -- Add to the tokens of an API key in a hash. A number that becomes 0 leaves it. Returns whether the key is
  -- new there.
  local function add_to_key(hash, key, tokens)
    local sum = redis.call('HINCRBY', hash, key .. ' tokens', tokens)
    if sum == 0 then redis.call('HDEL', hash, key .. ' tokens') end
    return sum == tokens
  end

  -- Tokens that the key of an account may still use this month.
  local function what_is_left(usage, account)
    if account.budget == 0 then return MOST_LEFT end
    local field = account.key .. ' tokens'
    read_clock()
    local spent = redis.call('HGET', usage .. ':spent:' .. month, field)
    local pending = redis.call('HGET', usage .. ':pending', field)
    return account.budget - (tonumber(spent) or 0) - (tonumber(pending) or 0)
  end

  -- Tokens of answers that the key of an account may still get this month. It is asked after all are counted.
  local left_by_budget = {}
  local function tokens_left(usage, account)
    if not account then return MOST_LEFT end
    local budget = account.key .. ' ' .. account.budget
    left_by_budget[budget] = left_by_budget[budget] or what_is_left(usage, account)
    return left_by_budget[budget]
  end

  -- Set aside what a request takes before its second token. False if its key's budget has no room for it;
  -- with `must`, it has.
  local function set_aside(usage, request, text, must)
    local account = read_account(text)
    if not account or account.budget == 0 then return true end
    local tokens = account.prompt + account.first
    if not must and what_is_left(usage, account) < tokens then return false end
    add_to_key(usage .. ':pending', account.key, tokens)
    -- the 0 is the money that scripts of earlier versions read
    redis.call('HSET', request, 'pending', string.format('%.0f 0', tokens))
    return true
  end

  local function release_pending(usage, request, account, pending)
    local tokens = string.match(pending, '^(%d+) ')
    if tokens then add_to_key(usage .. ':pending', account.key, -tokens) end
    redis.call('HDEL', request, 'pending')
  end

  local used = {} -- by owner: what `write_usage` adds

  -- How many more tokens of an attempt needed no step of their own than when it was asked last.
  local function speculated_since(request, attempt, total)
    if total == 0 then return 0 end
    local seen = redis.call('HGET', request, 'speculated') or ''
    local last_attempt, last = string.match(seen, '^(%d+) (%d+)$')
    redis.call('HSET', request, 'speculated', attempt .. ' ' .. total)
    return total - (last_attempt == attempt and tonumber(last) or 0)
  end

  -- Count the tokens of a request that are committed; `num_speculated` of the new ones needed no step of
  -- their own. `is_vector`: its answer is a vector, so that its prompt is all there is. Returns its account.
  local function count_tokens(usage, request, num_tokens, num_speculated, is_vector)
    local fields = redis.call('HMGET', request, 'account', 'counted', 'cached', 'pending')
    local text, counted, num_cached, pending = unpack(fields)
    local account = text and read_account(text) -- none where a gateway of an earlier version has admitted it
    local number = num_tokens - (tonumber(counted) or 0)
    if not account or (number <= 0 and (counted or not is_vector)) then return account end
    redis.call('HSET', request, 'counted', num_tokens)
    local sum = used[account.owner]
    if not sum then
      sum = {requests = 0, prompt = 0, cached = 0, generated = 0, speculated = 0}
      sum.key = account.key
      used[account.owner] = sum
    end
    sum.generated = sum.generated + number
    sum.speculated = sum.speculated + math.min(num_speculated, number)
    if not counted and account.prompt > 0 then
      local cached = math.min(tonumber(num_cached) or 0, account.prompt)
      sum.requests = sum.requests + 1
      sum.prompt, sum.cached = sum.prompt + account.prompt, sum.cached + cached
    end
    if pending then release_pending(usage, request, account, pending) end
    return account
  end

  -- Count the tokens of a request that has ended, perhaps without any. `attempt` has ended it, or none.
  -- `reason`: of a row's end; a row that ends at its length without a token has made a vector.
  local function count_end(usage, request, num_tokens, attempt, total_speculated, reason)
    local num_speculated = attempt and speculated_since(request, attempt, total_speculated) or 0
    local is_vector = num_tokens == 0 and reason == 'length'
    local account = count_tokens(usage, request, num_tokens, num_speculated, is_vector)
    local pending = account and redis.call('HGET', request, 'pending')
    if pending then release_pending(usage, request, account, pending) end
  end

  -- Count what the string of a request has.
  local function count_saved(usage, request, tokens, width, num_speculated)
    count_tokens(usage, request, redis.call('STRLEN', tokens) / (8 * width), num_speculated)
  end

  local function add_usage(hash, owner, sum, ttl_s)
    local field = owner .. '\ngenerated'
    if redis.call('HINCRBY', hash, field, sum.generated) == sum.generated then -- a new one
      if owner ~= OTHERS and redis.call('HLEN', hash) > MAX_FIELDS then
        redis.call('HDEL', hash, field)
        return add_usage(hash, OTHERS, sum, ttl_s)
      end
      redis.call('EXPIRE', hash, ttl_s)
    end
    for _, what in ipairs({'requests', 'prompt', 'cached', 'speculated'}) do
      if sum[what] ~= 0 then redis.call('HINCRBY', hash, owner .. '\n' .. what, sum[what]) end
    end
  end

  local function add_used(usage)
    read_clock()
    for owner, sum in pairs(used) do
      add_usage(usage .. ':hour:' .. hour, owner, sum, HOUR_TTL_S)
      add_usage(usage .. ':month:' .. month, owner, sum, MONTH_TTL_S)
      if sum.key ~= '' then
        local spent = usage .. ':spent:' .. month
        local is_new = add_to_key(spent, sum.key, sum.prompt + sum.generated)
        if is_new then redis.call('EXPIRE', spent, MONTH_TTL_S) end
      end
    end
  end

  -- Add what was counted to the hour's and the month's usage, and to what the keys have spent. A key that
  -- somebody has spoilt must not keep tokens from their clients.
  local function write_usage(usage)
    if next(used) == nil then return end
    local is_written, problem = pcall(add_used, usage)
    if not is_written then redis.log(redis.LOG_WARNING, 'usage is not counted: ' .. tostring(problem)) end
    used = {}
  end

  return {
    month_of = month_of,
    set_aside = set_aside,
    count_tokens = count_tokens,
    count_end = count_end,
    count_saved = count_saved,
    speculated_since = speculated_since,
    tokens_left = tokens_left,
    write = write_usage,
  }
end
