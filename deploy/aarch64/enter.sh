#!/usr/bin/env bash
# Run a command in the arm64 root. The kernel has to know aarch64 already (the scripts beside this one see to it).
#   enter.sh ROOT COMMAND...
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=emulation.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/emulation.sh"
inside "$@"
