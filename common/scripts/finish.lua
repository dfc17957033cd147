-- needs: lib/terminal
-- Publish the batcher's terminal of a request that no worker holds.
-- KEYS request, tokens
-- ARGV reason, number of tokens, error, its type, records, ttl in ms, channel, payload
return finish(KEYS[1], KEYS[2], unpack(ARGV)) and 1 or 0
