-- needs: lib/terminal
-- Publish the batcher's terminal of a request that no worker holds.
-- KEYS request, tokens
-- ARGV reason, num_tokens, error_text, error_type, records, ttl_ms, channel, payload
-- Returns 1, or 0 when it has ended already.
local is_first = finish(
  request, tokens, reason, num_tokens, error_text, error_type, records, ttl_ms, channel, payload
)
return is_first and 1 or 0
