#!/bin/sh
# alertmanager_entry.sh COMMAND…: entry point of the service alertmanager. Gives the receiver `team` the URL in ALERT_WEBHOOK, if it is set,
# then runs the command.
set -eu
config=${CONFIG:-/etc/alertmanager/alertmanager.yml}
made=${MADE:-/tmp} # folder of what this makes
if [ -n "${ALERT_WEBHOOK:-}" ]; then
    printf '%s' "$ALERT_WEBHOOK" >"$made/webhook" # a file takes any URL, and no log shows it
    grep -q '^  - name: team$' "$config" || { echo "ALERT_WEBHOOK needs a receiver \`  - name: team\` in $config" >&2; exit 78; }
    sed "s|^  - name: team\$|&\n    webhook_configs: [{url_file: $made/webhook}]|" "$config" >"$made/alertmanager.yml"
else
    cp "$config" "$made/alertmanager.yml"
fi
exec "$@"
