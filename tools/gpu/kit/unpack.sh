#!/bin/sh
# Puts the kit together where its parts were moved to: $KIT (default /tmp/kit).
set -eu
KIT=${KIT:-/tmp/kit}
cd "$KIT"
mkdir -p site
export PYTHONPATH="$KIT/unpacker"
unzstd_tar='import sys, zstandard
zstandard.ZstdDecompressor(max_window_size=2**31).copy_stream(sys.stdin.buffer, sys.stdout.buffer)'
pids=
for name in large rest; do
    cat "$name".tar.zst.* | python3 -c "$unzstd_tar" | tar -C site --sparse -xf - &
    pids="$pids $!"
done
[ ! -f jit.tar.gz ] || tar -xzf jit.tar.gz
for pid in $pids; do
    wait "$pid" || {
        echo "unpack.sh: a part is missing or damaged: move them here again" >&2
        exit 1
    }
done
rm -f ./*.tar.zst.*
# The machine's own NVIDIA libraries, but NCCL.
nvidia=$(PYTHONPATH='' python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')
for library in "$nvidia"/*; do
    [ "$(basename "$library")" = nccl ] || ln -sfn "$library" "site/nvidia/$(basename "$library")"
done
# The modules that every server process imports, so that not each of them compiles them.
cd site
python3 -m compileall -q -j 0 torch sglang triton flashinfer cudnn compressed_tensors tvm_ffi \
    torchvision transformers/*.py transformers/models/auto transformers/utils \
    transformers/generation transformers/integrations transformers/quantizers sgl_kernel tilelang \
    nvidia_cutlass_dsl/dsl_packages pydantic openai fastapi uvicorn starlette >/dev/null 2>&1 || true
du -sm .
