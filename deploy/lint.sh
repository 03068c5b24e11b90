#!/usr/bin/env bash
# Check everything in deploy/ with the tools made for it. A tool that is not installed is skipped, and said to be;
# any finding of one that is there gives exit status 1.
#   deploy/lint.sh            all of it
#   deploy/lint.sh --strict   a missing tool is a finding as well
set -uo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
cd -- "$here" || exit 1
strict=no
if [[ ${1:-} == --strict ]]; then strict=yes; fi
failed=() skipped=() passed=()

# check NAME COMMAND...: run it if its program is there.
check() {
  local name=$1
  shift
  if ! command -v "$1" >/dev/null; then
    skipped+=("$name: $1 is not installed")
    return
  fi
  local output
  if output=$("$@" 2>&1); then
    passed+=("$name")
  else
    failed+=("$name")
    printf -- '--- %s: %s\n%s\n' "$name" "$*" "$output"
  fi
}

# systemd-analyze wants every program to exist, and this machine has none of a device's: look at copies in which
# another program stands for them. A warning is a finding.
units_are_right() {
  local folder output
  folder=$(mktemp -d) || return
  local unit
  for unit in systemd/*.service systemd/*.timer; do
    sed -E 's#^ExecStart=/opt/fl-elastic/[^ ]+#ExecStart=/bin/true#; /^Documentation=/d' "$unit" >"$folder/${unit##*/}"
  done
  output=$(systemd-analyze verify --man=no "$folder"/*.service "$folder"/*.timer 2>&1)
  local status=$?
  rm -rf "$folder"
  printf '%s' "$output"
  [[ $status -eq 0 && -z $output ]]
}

# The exposure that systemd computes, from 0 (shut) to 10; more than 2.5 is a finding.
units_are_shut() {
  systemd-analyze security --offline=yes --no-pager --threshold=25 systemd/*.service
}

mapfile -t scripts < <(grep -rlE --exclude-dir=__pycache__ '^#!.*\b(ba)?sh$|^# shellcheck shell=' . | sort)
check "shellcheck" shellcheck --external-sources "${scripts[@]}"
check "yamllint" yamllint --strict --config-file ansible/.yamllint ansible container cloud-init
check "yamllint of user-data" yamllint --strict --config-file ansible/.yamllint cloud-init/user-data
if command -v systemd-analyze >/dev/null; then
  check "systemd-analyze verify" units_are_right
  check "systemd-analyze security" units_are_shut
else
  skipped+=("systemd units: systemd-analyze is not installed")
fi
cd ansible || exit 1
check "ansible-lint" ansible-lint --offline -q --nocolor
check "ansible-playbook site" ansible-playbook --syntax-check site.yml
check "ansible-playbook rollback" ansible-playbook --syntax-check rollback.yml
cd ..
check "hadolint" hadolint container/Containerfile
check "cloud-init schema" cloud-init schema --config-file cloud-init/user-data
for engine in docker podman; do
  if command -v $engine >/dev/null && $engine compose version >/dev/null 2>&1; then
    check "compose file" $engine compose --file container/compose.yaml config --quiet
    break
  fi
  if [[ $engine == podman ]]; then skipped+=("compose file: no engine with the command compose"); fi
done

printf 'passed:  %s\n' "${passed[@]:-nothing}"
if [[ ${#skipped[@]} -gt 0 ]]; then printf 'skipped: %s\n' "${skipped[@]}"; fi
if [[ ${#failed[@]} -gt 0 ]]; then printf 'FAILED:  %s\n' "${failed[@]}"; fi
[[ ${#failed[@]} -eq 0 && (${#skipped[@]} -eq 0 || $strict == no) ]]
