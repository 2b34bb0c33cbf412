#!/usr/bin/env bash
# Everything that needs real GPUs: builds the tree in place, runs the suite, compute-sanitizer over the kernels, the benchmarks.
# On two H200s the suite takes five minutes, the rest two. With one GPU most of the suite is skipped, unless NCCL lets two ranks share
# it: NCCL 2.30 or later in the process (LD_PRELOAD of its libnccl.so.2 serves torch and cdist) and NCCL_MULTI_RANK_GPU_ENABLE=1.
# Each step has its own limit; all output is in $OUT/run.log; a failed step does not stop the others.
#   OUT=folder tests/gpu/run.sh [all|test|bench]
cd "$(dirname "$0")/../.." || exit 1
what=${1:-all}
OUT=${OUT:-build/gpu}
mkdir -p "$OUT" build/gpu
: >"$OUT/run.log"
export NCCL_NVLS_ENABLE=0 PYTHONPATH=python:tests PYTHONUNBUFFERED=1
PY=${PY:-python3}
CC=${CC:-gcc}
failed=""

step() { # name seconds command…
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    echo "== $name"
    timeout -k 5 "$limit" "$@" >"build/gpu/$name.log" 2>&1
    status=$?
    tail -n 25 "build/gpu/$name.log"
    echo "== $name: exit $status after $((SECONDS - start)) s"
    # One file: a machine that sends results back may take only a few.
    { echo "== $name: exit $status"; cat "build/gpu/$name.log"; } >>"$OUT/run.log"
    [ $status = 0 ] || failed="$failed $name"
}

facts() {
    nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv
    nvidia-smi topo -m
    nvcc --version | tail -2
    $PY -c 'import sys, torch, cupy; print(sys.version, torch.__version__, torch.version.cuda, torch.cuda.nccl.version(), cupy.__version__)'
}
kernels_test() {
    $CC -std=c11 -O2 -g -D_GNU_SOURCE -Icsrc tests/gpu/test_kernels.c csrc/cuda/*.c csrc/base/*.c \
        build/kernels/kernels_image.c -lpthread -ldl -lm -o build/gpu/test_kernels && build/gpu/test_kernels
}
raw_loop() { $CC -shared -fPIC -O2 -std=c11 -D_GNU_SOURCE -Icsrc benchmarks/nccl_raw.c -ldl -o build/gpu/nccl_raw.so; }
export -f facts kernels_test raw_loop
export PY CC

step facts 40 bash -c facts
step build 100 $PY setup.py -q build_ext --inplace -j16
if [ "$what" != bench ]; then
    step kernels 40 bash -c kernels_test
    step memcheck 50 compute-sanitizer --tool memcheck --error-exitcode 3 build/gpu/test_kernels
    step racecheck 40 compute-sanitizer --tool racecheck --error-exitcode 3 build/gpu/test_kernels
    step initcheck 40 compute-sanitizer --tool initcheck --error-exitcode 3 build/gpu/test_kernels
    step abi 40 $PY -m pytest -q -rs -p no:cacheprovider tests/test_cuda_abi.py
    step suite 400 $PY -m pytest -q -rs -p no:cacheprovider --timeout 110 tests/gpu
fi
if [ "$what" != test ]; then
    step raw 20 bash -c raw_loop
    step bench 240 $PY benchmarks/gpu.py --raw build/gpu/nccl_raw.so --out "$OUT"
fi
echo "failed:${failed:- nothing}"
[ -z "$failed" ]
