#!/bin/sh
# Builds the kit: SGLang 0.5.23, tilelang and kvtier for an offline machine with Hopper cards, in
# folders small enough for machines that take small transfers only.
#
#   build.sh FOLDER          (default: .kit) makes FOLDER/0, FOLDER/1, ... each below 60 MB
#   refresh.sh FOLDER        after a change of kvtier or the cases: makes the last one anew
#
# Needs Python 3.12 (PYTHON), zstd, binutils; about 15 GB of disk and 5 to 15 minutes on two cores.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../../.." && pwd)
mkdir -p "${1:-.kit}"
kit=$(cd "${1:-.kit}" && pwd)
python=${PYTHON:-python3.12}
level=${LEVEL:-15}

[ -x "$kit/venv/bin/python" ] || "$python" -m venv "$kit/venv"
"$kit/venv/bin/pip" install -q uv
"$kit/venv/bin/uv" pip install -q --python "$kit/venv/bin/python" sglang==0.5.23 tilelang==0.1.12

rm -rf "$kit/site" "$kit/packed" "$kit"/[0-9]*
"$kit/venv/bin/python" "$here/make_site.py" "$kit/site"

# Two archives, so that they unpack side by side: the largest libraries, and all else.
large='torch/lib triton/_C sgl_kernel'
mkdir "$kit/packed"
pack() { # NAME TAR-ARGUMENTS
    name=$1
    shift
    tar -C "$kit/site" --exclude=__pycache__ --sort=name --owner=0 --group=0 --mtime=@1700000000 \
        --sparse --hole-detection=raw -cf - "$@" |
        zstd -q "-$level" -T0 --long=27 | split -b 56000000 -d -a 1 - "$kit/packed/$name.tar.zst."
}
# shellcheck disable=SC2086 # a list of words
pack large $large
# shellcheck disable=SC2046
pack rest $(for path in $large; do echo "--exclude=./$path"; done) .

number=0
mkdir "$kit/last"
for part in "$kit"/packed/*; do
    if [ "$(stat -c %s "$part")" -lt 15000000 ]; then
        mv "$part" "$kit/last/"
    else
        mkdir "$kit/$number"
        mv "$part" "$kit/$number/"
        number=$((number + 1))
    fi
done
mv "$kit/last" "$kit/$number" # short parts, and what changes between runs
"$here/refresh.sh" "$kit"
