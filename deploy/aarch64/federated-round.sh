#!/usr/bin/env bash
# One federated round: a native server, and a node that runs emulated in the root that build-root.sh makes.
#   federated-round.sh [FOLDER]     FOLDER and BOARD as for build-root.sh
# PYTHON chooses the native Python with fl_elastic in it (default: .venv of the checkout).
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd -- "$here/../.." && pwd)
folder=${1:-$checkout/.aarch64}
python=${PYTHON:-$checkout/.venv/bin/python}
# shellcheck source-path=SCRIPTDIR source=emulation.sh
source "$here/emulation.sh"

require_machine
[[ -x $python ]] || skip "needs a Python with fl_elastic at $python; say which with PYTHON"
"$here/build-root.sh" "$folder"
folder=$(cd -- "$folder" && pwd)
exec 9>"$folder/lock"
flock 9
trap forget_aarch64 EXIT
teach_aarch64
copy_checkout "$checkout" "$folder/root"
say "one federated round with a node on $PROCESSOR"
"$python" "$here/federated_round.py" "$folder/root"
