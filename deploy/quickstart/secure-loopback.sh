#!/usr/bin/env bash
# A secure federation of two sites on this machine: certificates, keys, server, sites, one run, and all is ended.
#   deploy/quickstart/secure-loopback.sh DIR [RECIPE]
# TLS, site keys, process isolation with a secret: the same options as in deploy/systemd, with files in DIR.
set -euo pipefail

HERE=$(cd "$(dirname "$0")/../.." && pwd)
DIR=${1:?name a folder for certificates, logs and the run}
RECIPE=${2:-$HERE/recipes/smoke.toml}
PORT=${UMBEL_PORT:-8000}
BIN=${UMBEL_BIN:-$HERE/.venv/bin}
mkdir -p "$DIR"
DIR=$(cd "$DIR" && pwd)
CERTS=$DIR/certs
export PATH="$BIN:$PATH" FLWR_HOME="$DIR/flwr" HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
mkdir -p "$FLWR_HOME" "$DIR/logs"

children=()
trap 'for p in "${children[@]}"; do kill -TERM "$p" 2>/dev/null || true; done; wait' EXIT
start() {
    local name=$1
    shift
    (cd "$DIR" && exec "$@") >"$DIR/logs/$name.log" 2>&1 &
    children+=($!)
}

python "$HERE/deploy/certs/certs.py" ca "$CERTS"
python "$HERE/deploy/certs/certs.py" server "$CERTS" --host localhost
python "$HERE/deploy/certs/certs.py" secret "$CERTS"
python "$HERE/deploy/certs/certs.py" site "$CERTS" clinic
python "$HERE/deploy/certs/certs.py" site "$CERTS" kitchen

cat >"$FLWR_HOME/config.toml" <<TOML
[superlink]
default = "study"

[superlink.study]
address = "127.0.0.1:$PORT"
root-certificates = "$CERTS/ca.crt"
TOML

start superlink flower-superlink --host 127.0.0.1 --port "$PORT" --ssl-ca-certfile "$CERTS/ca.crt" \
    --ssl-certfile "$CERTS/server.crt" --ssl-keyfile "$CERTS/server.key" --enable-supernode-auth \
    --isolation process --superexec-auth-secret-file "$CERTS/superexec.secret" \
    --database "$DIR/superlink.db" --disable-runtime-dependency-installation
start superexec flower-superexec --runtime-api-address "127.0.0.1:$PORT" --root-certificates "$CERTS/ca.crt" \
    --superexec-auth-secret-file "$CERTS/superexec.secret"

for _ in $(seq 120); do
    (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null && break
    sleep 0.5
done

next=$((PORT + 1))
for site in clinic kitchen; do
    flwr supernode register "$CERTS/sites/$site.pub" study >"$DIR/logs/register-$site.log"
    start "$site" umbel site start --superlink "127.0.0.1:$PORT" --root-certificates "$CERTS/ca.crt" \
        --auth-supernode-private-key "$CERTS/sites/$site.key" --host 127.0.0.1 --port "$next" \
        --node-config "name=\"$site\" data=\"demo:$site\" state-dir=\"$DIR/state/$site\""
    next=$((next + 1))
done

umbel run "$RECIPE" --federation study --set "run.output-dir=$DIR/run" --set clients.minimum=2
