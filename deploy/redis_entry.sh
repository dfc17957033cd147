#!/bin/sh
# redis_entry.sh redis-server …: entry point of the service redis. It makes the file of users: of each kind of process for which there is a
# password in /run/secrets, with the rights in deploy/users.acl (`tokenfleet doctor --acl`), and `default`, who may do everything.
# After SIGTERM, Redis runs until the fleet has drained.
# A machine that shuts down stops all services at once, but requests in flight need Redis until their last token. Redis ends at once
# if no gateway or worker is left, after three seconds if none of them drains, and after GRACE_S in any case.
port=${REDIS_PORT:-6379}
grace_s=${GRACE_S:-100}
look_s=3 # within this time, processes that were told to end at the same moment say so in their heartbeats

secrets=${SECRETS:-/run/secrets}

users() { # prints the file of users, with the hashes of their passwords
    echo "user default on #$(hash redis_admin) ~* &* +@all"
    while read -r user kind rules; do
        if [ -s "$secrets/redis_$kind" ]; then echo "$user $kind #$(hash "redis_$kind") $rules"; fi
    done <"${USERS:-/users.acl}"
}

hash() { # $1: name of a secret
    tr -d '\n' <"$secrets/$1" | sha256sum | cut -d ' ' -f 1
}

states() { # prints the state of each gateway and worker, one a line
    REDISCLI_AUTH=$(cat "$secrets/redis_admin") redis-cli -p "$port" --raw eval '
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

[ -s "$secrets/redis_admin" ] || { echo "there is no password in $secrets/redis_admin: run deploy/make_secrets.sh" >&2; exit 78; }
umask 077
users >"${ACL_FILE:-/tmp/users.acl}"
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
