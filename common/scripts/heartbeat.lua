-- needs: lib/heartbeat
-- Heartbeat of a process that is no worker.
-- KEYS process, processes
-- ARGV member, ttl_ms, ...
-- `process`: its hash. `member`: kind:name. More arguments: field, value of the hash.
return write_heartbeat(process, processes, member, ttl_ms, {unpack(ARGV, first_arg)})
