#!/usr/bin/env bash
# Build an arm64 Debian root with the pinned CPU torch and Flower, once; later calls return at once.
#   build-root.sh [FOLDER]     FOLDER (default: .aarch64 in the checkout) keeps the root between calls
# BOARD=pi3, pi4 (default) or pi5 chooses the processor and the constraints.
# Package sources are those of this machine: its apt mirror and its pip configuration.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd -- "$here/../.." && pwd)
folder=${1:-$checkout/.aarch64}
root=$folder/root
suite=bookworm
# shellcheck source-path=SCRIPTDIR source=emulation.sh
source "$here/emulation.sh"

require_machine
mkdir -p "$folder"
folder=$(cd -- "$folder" && pwd)
root=$folder/root
printf '*\n' >"$folder/.gitignore" # the cache never becomes part of the checkout
exec 9>"$folder/lock"
flock 9
trap forget_aarch64 EXIT
teach_aarch64

# What the finished root was made from; another answer builds it again.
recipe=$(cat -- "$here/requirements.txt" "$here/../constraints/$CONSTRAINTS" "$checkout/pyproject.toml" | sha256sum | cut -d' ' -f1)
if [[ -f $folder/recipe-${CONSTRAINTS%.txt} && "$(<"$folder/recipe-${CONSTRAINTS%.txt}")" == "$recipe" ]]; then
  say "root is ready: $root"
  exit 0
fi

mirror() {
  apt-get indextargets --format "\$(REPO_URI) \$(RELEASE)" 'Created-By: Packages' 2>/dev/null \
    | awk -v suite="$suite" '$2 == suite { print $1; exit }'
}

if [[ ! -f $folder/debootstrapped ]]; then
  rm -rf "$root"
  from=$(mirror)
  say "debootstrap of $suite for arm64 from ${from:-the default mirror}"
  # "from" is left out when this machine has no apt: debootstrap then takes its own default.
  debootstrap --arch=arm64 --variant=minbase \
    --include=ca-certificates,python3,python3-venv,iproute2 \
    "$suite" "$root" ${from:+"$from"} >"$folder/debootstrap.log" 2>&1 \
    || fail "debootstrap failed; the end of $folder/debootstrap.log: $(tail -n 3 "$folder/debootstrap.log")"
  touch "$folder/debootstrapped"
fi

# How pip and the resolver reach out is this machine's business, copied for the installation only.
cp /etc/resolv.conf "$root/etc/resolv.conf"
if [[ -f /etc/ssl/certs/ca-certificates.crt ]]; then
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
fi
pip_settings=()
while IFS='=' read -r -d '' name value; do
  case $name in
    PIP_* | http_proxy | https_proxy | no_proxy | HTTP_PROXY | HTTPS_PROXY | NO_PROXY) pip_settings+=("$name=$value") ;;
  esac
done < <(env -0)
install_pip_settings() {
  local file
  for file in /etc/pip.conf /root/.config/pip/pip.conf /root/.pip/pip.conf; do
    # The home of the caller stands for /root, which is the home inside.
    local from=${file/#\/root/${HOME:-/root}}
    rm -f "$root$file"
    if [[ $1 == yes && -f $from ]]; then install -D -m 0644 "$from" "$root$file"; fi
  done
}
install_pip_settings yes

copy_checkout "$checkout" "$root"
say "pip install into the root (torch for aarch64, without CUDA)"
[[ -x $root$VENV/bin/python ]] || inside "$root" python3 -m venv "$VENV"
inside "$root" /usr/bin/env "${pip_settings[@]}" \
  "$VENV/bin/python" -m pip install --quiet --only-binary=:all: --no-cache-dir \
  --constraint "deploy/constraints/$CONSTRAINTS" --requirement deploy/aarch64/requirements.txt \
  --editable '.[vision]' >"$folder/pip.log" 2>&1 \
  || fail "pip failed; the end of $folder/pip.log: $(tail -n 3 "$folder/pip.log")"
inside "$root" "$VENV/bin/python" -m pip install --quiet --no-deps --editable ./simulations >>"$folder/pip.log" 2>&1 \
  || fail "pip failed; the end of $folder/pip.log: $(tail -n 3 "$folder/pip.log")"
install_pip_settings no

inside "$root" "$VENV/bin/python" -c '
import platform, torch
assert platform.machine() == "aarch64", platform.machine()
assert torch.version.cuda is None, "a CUDA build of torch"
print("aarch64: torch", torch.__version__, "on", platform.machine())'
printf '%s\n' "$recipe" >"$folder/recipe-${CONSTRAINTS%.txt}"
say "root is built: $root"
