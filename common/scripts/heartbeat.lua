-- needs: lib/heartbeat
-- Heartbeat of a process that is no worker.
-- KEYS hash of the process, processes   ARGV kind:name, ttl in ms, then field, value of the hash
return write_heartbeat(KEYS[1], KEYS[2], ARGV)
