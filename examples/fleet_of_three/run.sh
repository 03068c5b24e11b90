#!/usr/bin/env bash
# A server and three nodes on this machine, with TLS and keys; an app of one's own is trained on them. Then they are stopped.
#
#     ./run.sh [ROUNDS]        FLEET=fleet  PORT=9470
set -euo pipefail
cd "$(dirname "$0")"

rounds=${1:-3} fleet=${FLEET:-$PWD/fleet} port=${PORT:-9470}
nodes=(node0 node1 node2) speedups=(1 2 3)
started=()

# What was started is stopped by its process id, the last one first: also after an error or Ctrl-C.
stop() {
    for ((i = ${#started[@]} - 1; i >= 0; i--)); do
        kill "${started[i]}" 2>/dev/null || true
    done
    wait
    echo "stopped: ${started[*]}"
}
trap stop EXIT
trap 'exit 130' INT TERM

# Ask again every second; give up after a minute and a half.
until_true() {
    for _ in {1..90}; do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 1
    done
    echo "gave up on: $*; see the logs in $fleet/logs" >&2
    return 1
}

# 1. Keys, a certificate and an inventory. Settings of a node are its own: nobody else can change them.
fl-elastic fleet init "$fleet" --server-address 127.0.0.1 --port "$port" --node node0 --node node1 --node node2
for i in 0 1 2; do
    fl-elastic fleet add "$fleet" "${nodes[i]}" --set "speedup=${speedups[i]}" --set threads=1 \
        --set "runtime-port=$((port + 1 + i))"
done
mkdir -p "$fleet/logs"

# 2. The server; each of these processes becomes Flower's own, so its id is the one to stop.
fl-elastic fleet server "$fleet" --host 127.0.0.1 >"$fleet/logs/server.log" 2>&1 &
started+=($!)
# It answers only nodes whose keys it has been told.
until_true fl-elastic fleet register "$fleet"

# 3. The nodes. On a device of its own each has a copy of its folder and nothing else of the fleet's.
for name in "${nodes[@]}"; do
    fl-elastic fleet node "$fleet/nodes/$name" >"$fleet/logs/$name.log" 2>&1 &
    started+=($!)
done
online() { [ "$(fl-elastic fleet status "$fleet" --json | grep -o '"online"' | wc -l)" = 3 ]; }
until_true online

# 4. The app, and how its run really ended: this fails if the run does.
fl-elastic fleet submit "$fleet" app --set "num-server-rounds=$rounds"
fl-elastic fleet status "$fleet"
