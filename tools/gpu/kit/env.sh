# Sourced before anything runs on the offline machine. KIT: where the kit was unpacked.
KIT=${KIT:-/tmp/kit}
export KIT
export PYTHONPATH="$KIT/kvtier:$KIT/site:$KIT/site/nvidia_cutlass_dsl/dsl_packages:$KIT"
export PATH="$KIT/bin:$PATH"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export CUDA_HOME="${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}"
# The cuDNN of the machine is not the one that torch was built with; nothing here uses it.
export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 SGLANG_DISABLE_CUDNN_CHECK=1
# Kernels that are compiled at first use, kept in one place to take along.
export TRITON_CACHE_DIR=$KIT/jit/triton SGLANG_JIT_CACHE_DIR=$KIT/jit/sglang
export TVM_FFI_CACHE_DIR=$KIT/jit/tvm SGLANG_DG_CACHE_DIR=$KIT/jit/dg
export FLASHINFER_WORKSPACE_BASE=$KIT/jit/fi TILELANG_CACHE_DIR=$KIT/jit/tilelang
export TORCH_EXTENSIONS_DIR=$KIT/jit/torch_extensions TORCHINDUCTOR_CACHE_DIR=$KIT/jit/inductor
export SGLANG_JIT_DEEPGEMM_PRECOMPILE=0
# Multicast between cards is not allowed on every host.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
# Several servers start on the same cards at once, so what is free differs from card to card.
export SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0
