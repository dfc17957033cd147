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
