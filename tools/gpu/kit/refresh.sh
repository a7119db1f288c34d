#!/bin/sh
# Puts what changes between runs into the kit's last folder: kvtier, the cases, compiled kernels.
#
#   refresh.sh FOLDER        (default: .kit) as build.sh made it
set -eu
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../../.." && pwd)
kit=$(cd "${1:-.kit}" && pwd)
last=$(printf '%s\n' "$kit"/[0-9]* | sort -V | tail -n 1)

rm -rf "$last/kvtier" "$last/unpacker" "$last/cases" "$last/models" "$last/bin"
for package in "$repo" "$repo/tools/gpu/probe"; do
    "$kit/venv/bin/uv" pip install -q --python "$kit/venv/bin/python" --no-deps \
        --reinstall --refresh --target "$last/kvtier" "$package"
done
mkdir "$last/unpacker"
cp -r "$kit/site/zstandard" "$last/unpacker/"
strip --strip-all "$last"/unpacker/zstandard/*.so
cp -r "$repo/tools/gpu/cases" "$repo/tools/gpu/models" "$here/bin" "$here/unpack.sh" \
    "$here/env.sh" "$here/launched.sh" "$last/"
[ ! -f "$kit/jit.tar.gz" ] || cp "$kit/jit.tar.gz" "$last/"
find "$last" -name __pycache__ -prune -exec rm -r {} +
du -sb "$kit"/[0-9]*
