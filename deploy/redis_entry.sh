#!/bin/sh
# redis_entry.sh redis-server …: entry point of the service redis. After SIGTERM, Redis runs until the fleet has drained.
# A machine that shuts down stops all services at once, but requests in flight need Redis until their last token. Redis ends at once
# if no gateway or worker is left, after three seconds if none of them drains, and after GRACE_S in any case.
port=${REDIS_PORT:-6379}
grace_s=${GRACE_S:-100}
look_s=3 # within this time, processes that were told to end at the same moment say so in their heartbeats

states() { # prints the state of each gateway and worker, one a line
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
