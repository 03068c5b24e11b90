#!/usr/bin/env bash
# A sensor writes a table, a service learns from it; the service is killed in the middle and started again.
#
#     ./run.sh [ROWS]
set -euo pipefail
cd "$(dirname "$0")"

rows=${1:-1200}
sensor='' service=''
stop() {
    for id in "$service" "$sensor"; do
        if [ -n "$id" ]; then kill "$id" 2>/dev/null || true; fi
    done
    wait
}
trap stop EXIT
trap 'exit 130' INT TERM

# With exec the process id is the service's own, and not that of a shell around it.
serve() {
    exec fl-elastic stream --source csv:readings.csv --state-dir state \
        --model stream_model:network --input 4 --outputs 2 --speedup 2 "$@"
}
# Wait until the service has kept something since then; it ends badly if the service does.
until_at_work() {
    until [ state/events.log -nt "$1" ]; do
        kill -0 "$service"
        sleep 0.2
    done
}

python producer.py readings.csv --rows "$((rows / 2))" &
sensor=$!
until [ -s readings.csv ]; do sleep 0.1; done

touch began
serve --follow &
service=$!
until_at_work began
sleep 1
kill -KILL "$service"
wait "$service" 2>/dev/null || true
echo "killed without warning, when the table had $(($(wc -l <readings.csv) - 1)) rows"

# Half of the rows come only now, so that the service has something left to do, however fast it was.
wait "$sensor"
touch began
python producer.py readings.csv --rows "$rows" &
sensor=$!
serve --follow &
service=$!
until_at_work began
wait "$sensor"
sensor=''
kill -TERM "$service"
wait "$service"
service=''
echo "stopped in good order"

# Without --follow it reads what is left, if anything is, and ends.
(serve)
rm began
python check.py readings.csv state
