#!/bin/bash
# tools/setup.sh core|sglang: make .venv ready, or do nothing when it is.
#
#   core     kvtier, its tests and linters
#   sglang   core, and real SGLang with the test-only platform, to run without a GPU
#
# Installed is what requirements/ locks. PYTHON names the interpreter (python3); a pip argument
# for torch alone, such as the index of its CPU builds, goes into TORCH_PIP_ARGS.
set -euo pipefail
cd "$(dirname "$0")/.."

layer=${1:?usage: tools/setup.sh core|sglang}
python=${PYTHON:-python3}
torch=torch==2.13.0
sglang=sglang==0.5.23
log=.venv/setup.log

fail() {
    echo "setup: $*" >&2
    exit 1
}

# fingerprint LAYER: everything that decides what ends up in .venv. The folder's own path is part
# of it, since a virtual environment cannot be moved.
fingerprint() {
    { pwd; echo "$1"; "$python" -VV; cat tools/setup.sh pyproject.toml requirements/core.txt
      if [ "$1" = sglang ]; then
          cat requirements/sglang.txt tests/sglang/platform/pyproject.toml
      fi; } | sha256sum | cut -d' ' -f1
}

ready() {
    [ -x .venv/bin/python ] && [ "$(cat ".venv/.$layer" 2>/dev/null)" = "$(fingerprint "$layer")" ]
}

# step TEXT COMMAND...: run it with its output in the log and a clock on the terminal.
step() {
    local text=$1 began=$SECONDS clock=
    shift
    if [ -t 2 ]; then
        while :; do printf '\rsetup: %s … %d s' "$text" $((SECONDS - began)) >&2; sleep 1; done &
        clock=$!
    else
        echo "setup: $text …" >&2
    fi
    local status=0
    "$@" >>"$log" 2>&1 </dev/null || status=$?
    if [ -n "$clock" ]; then
        kill "$clock" 2>/dev/null
        wait "$clock" 2>/dev/null || true
        printf '\r' >&2
    fi
    if [ $status -ne 0 ]; then
        tail -n 25 "$log" >&2
        fail "$text failed; the whole output is in $log"
    fi
    echo "setup: $text: $((SECONDS - began)) s" >&2
}

has_header() { echo "#include <$1>" | g++ -E -x c++ "${@:2}" - >/dev/null 2>&1; }

# The Debian packages that are missing. HiCache compiles its page hash at first use: g++ and the
# headers of Python and OpenSSL (pybind11's come with torch, ninja with pip).
missing_packages() {
    command -v "$python" >/dev/null || echo python3
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    # Tests put stores on file systems of their own, and faults below them.
    PATH=$PATH:/usr/sbin command -v mkfs.ext4 >/dev/null || echo e2fsprogs
    PATH=$PATH:/usr/sbin command -v mkfs.xfs >/dev/null || echo xfsprogs
    command -v gcc >/dev/null || echo gcc libc6-dev
    if [ "$layer" = sglang ]; then
        local include
        include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null || true)
        command -v g++ >/dev/null || echo g++
        [ -e "$include/Python.h" ] || echo python3-dev
        has_header openssl/sha.h || echo libssl-dev
    fi
}

install_packages() {
    local packages
    packages=$(missing_packages | xargs)
    [ -n "$packages" ] || return 0
    local line="apt-get update && apt-get install -y --no-install-recommends $packages"
    command -v apt-get >/dev/null || fail "these packages are missing: $packages"
    [ "$(id -u)" = 0 ] || fail "packages are missing; type this, then try again: sudo sh -c '$line'"
    step "Debian packages: $packages" env DEBIAN_FRONTEND=noninteractive sh -c "$line"
    packages=$(missing_packages | xargs)
    [ -z "$packages" ] || fail "installed, but $python does not see them: $packages"
}

pip() { .venv/bin/python -m pip --disable-pip-version-check install "$@"; }

have_venv() { # of this interpreter, and made for this folder
    [ "$(.venv/bin/python -VV 2>/dev/null)" = "$("$python" -VV)" ] &&
        head -n 1 .venv/bin/pip 2>/dev/null | grep -qF "#!$PWD/.venv/bin/"
}

make_venv() {
    have_venv && return
    rm -rf .venv/bin .venv/lib .venv/include .venv/pyvenv.cfg
    step "virtual environment .venv" "$python" -m venv .venv
}

install_core() {
    make_venv
    step "kvtier's dependencies, tests and linters" pip -r requirements/core.txt
    step "kvtier" pip --no-deps -e .
    fingerprint core >.venv/.core
}

install_sglang() {
    make_venv
    # shellcheck disable=SC2086  # TORCH_PIP_ARGS may be several arguments
    step "$torch" pip ${TORCH_PIP_ARGS:-} "$torch"
    step "what SGLang imports" pip -r requirements/sglang.txt
    step "$sglang" pip --no-deps "$sglang"
    install_core
    step "the test-only platform" pip --no-deps -e tests/sglang/platform
    fingerprint sglang >.venv/.sglang
}

[ "$layer" = core ] || [ "$layer" = sglang ] || fail "no layer '$layer': core or sglang"
mkdir -p .venv
exec 9>.venv/.lock
flock 9 # two makes at once: the second one waits, and finds the work done
ready && exit 0
: >"$log"
install_packages
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "Python 3.11 or newer is needed; set PYTHON to one (now: $python)"
"install_$layer"
