#!/bin/sh
# make_secrets.sh [FOLDER]: makes the passwords that docker-compose.yml reads as secrets, in secrets/ beside it. What is there already stays.
# The folder is its owner's alone. The files in it can be read by all, since containers read them as users of their own.
set -eu
folder=${1:-$(dirname "$0")/../secrets}
mkdir -p "$folder"
chmod 700 "$folder"
for name in redis_admin redis_gateway redis_batcher redis_worker grafana_admin; do
    [ -s "$folder/$name" ] || head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$folder/$name"
    chmod 644 "$folder/$name"
done
echo "passwords are in $folder: keep a copy, and let no repository have them"
