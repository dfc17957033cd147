#!/bin/sh
# redis_entry.sh redis-server …: the entry of the service redis. At SIGTERM a fleet that drains may finish first.
# A machine that shuts down stops all services at once, and requests in flight need Redis until the last token. Redis alone ends
# three seconds after SIGTERM, with a fleet that has left at once, and after GRACE_S in any case.
port=${REDIS_PORT:-6379}
grace_s=${GRACE_S:-100}
look_s=3 # within which processes that were told to end at the same time say so in their heartbeats

states() { # of each gateway and worker, a line each
    redis-cli -p "$port" --raw eval '
        local states = {}
        for _, kind in ipairs({"gateway", "worker"}) do
            for _, key in ipairs(redis.call("KEYS", "tf:*:" .. kind .. ":*")) do
                states[#states + 1] = redis.call("HGET", key, "state") or "unknown"
            end
        end
        return states' 0
}

is_needed() { # $1: seconds since SIGTERM
    found=$(states) || return 1
    case $found in
        "") return 1 ;;
        *draining*) [ "$1" -lt "$grace_s" ] ;;
        *) [ "$1" -lt "$look_s" ] ;;
    esac
}

told=
trap 'told=1' TERM INT
docker-entrypoint.sh "$@" &
server=$!
wait "$server"
status=$?
if [ -n "$told" ] && kill -0 "$server" 2>/dev/null; then
    waited_s=0
    while is_needed "$waited_s"; do
        sleep 1
        waited_s=$((waited_s + 1))
    done
    kill -TERM "$server"
    wait "$server"
    status=$?
fi
exit "$status"
