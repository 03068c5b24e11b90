#!/usr/bin/env bash
# Run the unit tests of the core on aarch64, in the root that build-root.sh makes.
#   run-tests.sh [FOLDER [PYTEST ARGUMENTS...]]     FOLDER and BOARD as for build-root.sh
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd -- "$here/../.." && pwd)
folder=${1:-$checkout/.aarch64}
if [[ $# -gt 0 ]]; then shift; fi
# shellcheck source-path=SCRIPTDIR source=emulation.sh
source "$here/emulation.sh"

require_machine
"$here/build-root.sh" "$folder"
folder=$(cd -- "$folder" && pwd)
exec 9>"$folder/lock"
flock 9
trap forget_aarch64 EXIT
teach_aarch64
copy_checkout "$checkout" "$folder/root"

if [[ $# -eq 0 ]]; then
  # One thread: emulated threads that wait for each other in a loop eat the processor.
  set -- tests/groups tests/profiling tests/planning tests/training tests/update
  while IFS= read -r line; do
    case $line in '' | '#'*) ;; *) set -- "$@" "--deselect=$line" ;; esac
  done <"$here/deselected.txt"
fi
say "pytest on aarch64 ($BOARD, $PROCESSOR): $*"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} inside "$folder/root" \
  "$VENV/bin/python" -m pytest -p no:cacheprovider --durations=15 "$@"
