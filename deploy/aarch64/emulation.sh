# shellcheck shell=bash
# Shared by the scripts beside it: what they need from the machine, and how they enter the arm64 root.
# Every mount lives in a mount namespace of its own, so nothing stays mounted afterwards.

readonly BINFMT=/proc/sys/fs/binfmt_misc
readonly ENTRY=fl-elastic-aarch64
# An ELF file, 64 bit, little endian, for AArch64 (machine 183).
readonly MAGIC='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
readonly MASK='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'

# The board that is played: its processor, and the constraints and environment that go with it. qemu's default
# processor has every extension there is; torch then takes paths that no Pi has.
readonly BOARD=${BOARD:-pi4}
case $BOARD in
  pi3) PROCESSOR=cortex-a53 CONSTRAINTS=aarch64.txt ;;
  pi4) PROCESSOR=cortex-a72 CONSTRAINTS=aarch64.txt ;;
  pi5) PROCESSOR=cortex-a76 CONSTRAINTS=aarch64-pi5.txt ;;
  *)
    printf 'aarch64: error: BOARD is %s; expected pi3, pi4 or pi5\n' "$BOARD" >&2
    exit 2
    ;;
esac
readonly PROCESSOR CONSTRAINTS
readonly VENV=/opt/venv-${CONSTRAINTS%.txt}

say() { printf 'aarch64: %s\n' "$*"; }

# Exit status 77 is what test drivers read as "skipped".
skip() {
  printf 'aarch64: SKIPPED: %s\n' "$*"
  exit 77
}

fail() {
  printf 'aarch64: error: %s\n' "$*" >&2
  exit 1
}

require_machine() {
  [[ "$(uname -s)" == Linux ]] || skip "needs Linux, this is $(uname -s)"
  [[ "$(id -u)" == 0 ]] || skip "needs root, for chroot and binfmt_misc (you are uid $(id -u))"
  local tool
  for tool in debootstrap unshare chroot flock tar; do
    command -v "$tool" >/dev/null || skip "needs the command $tool (packages debootstrap, util-linux)"
  done
  native || command -v qemu-aarch64-static >/dev/null \
    || skip "needs the command qemu-aarch64-static (package qemu-user-static)"
}

# On an arm64 machine nothing has to be emulated.
native() { [[ "$(uname -m)" == aarch64 ]]; }

# What this machine already knows is used; what is added here is taken back by forget_aarch64.
ADDED_ENTRY=no
ADDED_MOUNT=no
teach_aarch64() {
  native && return
  if [[ ! -e $BINFMT/register ]]; then
    mount -t binfmt_misc binfmt_misc "$BINFMT" 2>/dev/null \
      || skip "binfmt_misc cannot be mounted here (a container without the privilege?)"
    ADDED_MOUNT=yes
  fi
  local known
  for known in "$BINFMT"/*; do
    case "${known##*/}" in register | status) continue ;; esac
    # The flag F opens the interpreter now, so that it is found from inside the root as well.
    if grep -q '^enabled' "$known" && grep -q "aarch64" "$known" && grep -q '^flags:.*F' "$known"; then
      return
    fi
  done
  printf ':%s:M::%s:%s:%s:OCF' "$ENTRY" "$MAGIC" "$MASK" "$(command -v qemu-aarch64-static)" \
    >"$BINFMT/register" || skip "the kernel refused to register aarch64 with binfmt_misc"
  ADDED_ENTRY=yes
}

forget_aarch64() {
  if [[ $ADDED_ENTRY == yes ]]; then echo -1 >"$BINFMT/$ENTRY"; fi
  if [[ $ADDED_MOUNT == yes ]]; then umount "$BINFMT" || true; fi
  ADDED_ENTRY=no ADDED_MOUNT=no
}

# copy_checkout CHECKOUT ROOT: put what git knows, changed or new, at /opt/checkout of the root.
copy_checkout() {
  rm -rf "$2/opt/checkout"
  mkdir -p "$2/opt/checkout"
  if git -C "$1" rev-parse --git-dir >/dev/null 2>&1; then
    # A file that was deleted but not yet committed is still listed; tar says so and goes on.
    git -C "$1" ls-files -z --cached --others --exclude-standard \
      | tar -C "$1" --null --files-from=- --ignore-failed-read -cf - 2>/dev/null \
      | tar -C "$2/opt/checkout" -xf -
  else
    tar -C "$1" --exclude=./.venv --exclude=./.aarch64 --exclude=./out -cf - . | tar -C "$2/opt/checkout" -xf -
  fi
}

# inside ROOT COMMAND...: run a command in the root, in the copy of the checkout, with /proc and /dev.
inside() {
  local root=$1
  shift
  # shellcheck disable=SC2016 # the inner shell expands these
  unshare --mount --propagation private -- /bin/bash -euc '
    root=$1
    shift
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o size=2g tmpfs "$root/tmp"
    exec chroot "$root" "$@"
  ' inside "$root" \
    /usr/bin/env -i --chdir=/opt/checkout HOME=/root LANG=C.UTF-8 LC_ALL=C.UTF-8 TERM=dumb \
    PATH="$VENV/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    QEMU_CPU="$PROCESSOR" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 \
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" \
    "$@"
}
