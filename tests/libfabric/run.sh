#!/usr/bin/env bash
# Runs Python of an environment that `requirements/install.sh VENV libfabric` built:
#
#     tests/libfabric/run.sh VENV ARGUMENTS...
#
# It finds the libraries of NIXL's LIBFABRIC plugin there, and runs in a network namespace of its own
# with one pair of interfaces where the kernel lets us: libfabric's tcp provider does not take the
# loopback interface for what NIXL asks, and this host may have no other. Sockets keep little there:
# over this provider a WRITE is done when a socket has its bytes, and with the usual megabytes every
# WRITE would be done before anything could happen to it.
set -euo pipefail

venv=$(cd "$1" && pwd)
shift

libraries=$venv/lib/stubs:$venv/lib/openmpi
for folder in "$venv"/lib/python3.*/site-packages/nvidia/cuda_runtime/lib; do
  libraries+=:$folder
done
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export FI_PROVIDER_PATH=/nonexistent # the wheel's providers for fabrics want libraries of their own
export PUSHKV_LIBFABRIC=1

own_network='ip link set lo up && ip link add left type veth peer name right &&
  ip addr add 10.83.0.1/24 dev left && ip link set left up && ip link set right up &&
  echo 4096 16384 65536 >/proc/sys/net/ipv4/tcp_wmem &&
  echo 4096 65536 65536 >/proc/sys/net/ipv4/tcp_rmem'
if unshare -rn bash -c "$own_network" >/dev/null 2>&1; then
  exec unshare -rn bash -c "$own_network"' && exec "$@"' bash "$venv/bin/python" "$@"
fi
exec "$venv/bin/python" "$@"
