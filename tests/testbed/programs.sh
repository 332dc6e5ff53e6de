#!/bin/sh
# Programs that tests talk to, from Debian's packages.  Where they cannot be had the tests that need them skip and say so.
# programs.sh TOOLS [hosts]: with `hosts` also what it takes to boot hosts.
set -u
tools=$1
missing=""

need() {
  PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null || missing="$missing $2"
}

need ip iproute2
need nft nftables
need nsenter util-linux
need gcc "gcc libc6-dev"
if [ "${2:-}" = hosts ]; then
  need systemd-nspawn systemd-container
  need debootstrap debootstrap
  need ssh openssh-client
  need qemu-system-x86_64 qemu-system-x86
  need cpio cpio
fi
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  # shellcheck disable=SC2086  # one word each
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } >&2 ||
    echo "could not install$missing; tests that need them will skip" >&2
elif [ -n "$missing" ]; then
  echo "not installed:$missing; tests that need them will skip (root on Debian installs them)" >&2
fi

# Only unpacked: installed, the package would start a server.
mkdir -p "$tools"
if ! command -v promtool >/dev/null && [ ! -x "$tools/promtool" ] && command -v apt-get >/dev/null; then
  draft=$(mktemp -d)
  trap 'rm -rf "$draft"' EXIT
  chmod 755 "$draft"
  { (cd "$draft" && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; }) &&
    dpkg-deb -x "$draft"/prometheus_*.deb "$draft/root" && mv "$draft"/root/usr/bin/prom* "$tools"; } >&2 ||
    echo "could not fetch prometheus; tests that need it will skip" >&2
fi
exit 0
