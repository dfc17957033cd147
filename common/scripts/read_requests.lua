-- Read requests: some fields of each, and with '1' the tokens in its string. A key of another type is read as
-- absent.
-- KEYS request, tokens of each   ARGV '1' or '', then names of fields
-- Returns for each request its fields, then its tokens.
local answer = {}
for i = 1, #KEYS, 2 do
  local fields = redis.pcall('HMGET', KEYS[i], unpack(ARGV, 2))
  if fields.err then
    fields = {}
    for j = 1, #ARGV - 1 do fields[j] = false end
  end
  local tokens = ARGV[1] == '1' and redis.pcall('GET', KEYS[i + 1])
  fields[#ARGV] = type(tokens) == 'string' and tokens
  answer[#answer + 1] = fields
end
return answer
