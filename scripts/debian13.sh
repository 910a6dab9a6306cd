#!/usr/bin/env bash
# Run a command in this checkout on Debian 13, whose Python is 3.13. It needs root, and debootstrap, which makes
# Debian's root directory in build/debian13. What is mounted there ends with the command.
#   scripts/debian13.sh COMMAND ARG...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD/build/debian13
export PATH=$PATH:/usr/sbin:/sbin

if [[ ! -e $root.done ]]; then
  rm -rf "$root"
  mkdir -p "$root/checkout"
  debootstrap --variant=minbase --include=ca-certificates,python3.13-venv trixie "$root" >"$root.log" ||
    { tail "$root.log" >&2; exit 1; }
  touch "$root.done"
fi
cp /etc/resolv.conf "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # with those that this machine trusts besides
exec unshare --mount bash -euc 'for name in dev proc; do mount --rbind "/$name" "$0/$name"; done
  mount --bind "$PWD" "$0/checkout"
  exec chroot "$0" env -C /checkout "$@"' "$root" "$@"
