#!/bin/sh
# admin COMMAND…: redis-cli with all rights, inside the service redis: `docker compose exec redis admin INFO`.
REDISCLI_AUTH=$(cat /run/secrets/redis_admin)
export REDISCLI_AUTH
exec redis-cli -p "${REDIS_PORT:-6379}" "$@"
