#!/usr/bin/env bash
# Everything that is tested on aarch64: the root, the unit tests of the core, one federated round.
#   test.sh [FOLDER]     FOLDER (default: .aarch64 in the checkout) keeps the root between calls
# BOARD=pi3, pi4 (default) or pi5 chooses processor and torch. Exit status 77: skipped, with the reason.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# The round first: it takes minutes, and the tests a quarter of an hour or more.
"$here/federated-round.sh" "$@"
"$here/run-tests.sh" "$@"
