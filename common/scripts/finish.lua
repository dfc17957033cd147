-- needs: lib/terminal
-- Publish the batcher's terminal of a request that no worker holds.
-- KEYS request, result, tokens   ARGV reason, result, ttl in ms, channel, payload
return finish(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]) and 1 or 0
