#!/usr/bin/env bash
# Checks moeedge on an NVIDIA GPU: builds the pinned llama-cpp-python with CUDA for that GPU's architecture alone, runs the
# hybrid correctness tests on the device and a benchmark against stock llama.cpp.
#
#   run_gpu_checks.sh --pack FILE.tar.xz         with a network: everything that the other two need, well below 64 MiB
#   run_gpu_checks.sh --archive FILE --build DIR without a network: compile into DIR; run again, it goes on where it was cut
#   run_gpu_checks.sh --check DIR                single calls, tests and benchmark with what was compiled there
#   run_gpu_checks.sh --archive FILE --all DIR   compile and check, without a network, in one command
#   run_gpu_checks.sh DIR                        all of it, with a network
#
#   --dry-run       no CUDA: the emulated device takes the GPU's place; --check without a build then uses the
#                   llama-cpp-python that is installed
#   --arch 90       compile for this compute capability instead of the GPU's that is here
#   --jobs N        compile N files at once; as many as there are processors unless given
#   --python 3.12   with --pack: the Python version of the other machine
#   --repeats N, --n-predict N, --ratio R, --threads N
#                   of the benchmark: prompts, tokens of an answer, share of the experts with a slot on the GPU
#   --micro-only, --tests-only, --bench-only, --tests EXPRESSION      parts of --check; the latter is pytest's -k
#   --limit SECONDS for each part of --check; a part that takes longer ends, the others run
#   --out FOLDER    bench.json, micro.json, tests.xml and all logs; DIR/out unless given
#
# A part that fails does not keep the next from running; the exit status is 1 then.
#
# Each of --build and --check takes less than ten minutes on 16 cores (compiling for capability 9.0 with CUDA 13: 38 minutes
# of processor time in 290 files, the longest of which takes two). The other machine needs bash, a C++ compiler, cmake
# 3.21, the CUDA toolkit with nvcc (cuBLAS may come from it or from the nvidia-cublas package) and Python of that version
# with pip; --python's packages and ninja travel in the archive. $PYTHON names another interpreter than python3.
#
# The benchmark is moeedge bench: stock with its experts on the CPU, stock with whole layers in the same VRAM, and moeedge
# with the policies spac and static, with drafts and without, in turns, on the bundled target widened to the width of
# Qwen3-30B-A3B (48 layers, 16 GB). Each prompt is one of the toy's; docs/bench.md describes bench.json. Where it was cut
# off, moeedge bench --resume goes on. It fails where answers differ beyond a near-tie of 0.05, as a GPU's rounding can
# make them: the key `different` says by how much. micro.json (schema moeedge-gpu-micro-1) has the times of single calls,
# tests.xml counts and seconds of each test. The predictions to compare with are in docs/benchmarks/predictions-gpu.json.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
version=$(sed -n 's/^set(MOEEDGE_LLAMA_CPP_PYTHON_VERSION "\(.*\)")$/\1/p' "$root/moeedge/native/CMakeLists.txt")
sha256=$(sed -n 's/^set(MOEEDGE_LLAMA_CPP_PYTHON_SHA256 "\(.*\)")$/\1/p' "$root/moeedge/native/CMakeLists.txt")
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # plugins of the other machine are none of ours
wheels=(numpy gguf jinja2 diskcache typing-extensions rich typer prompt_toolkit psutil nvidia-ml-py pytest ninja
    "scikit-build-core>=0.10")
limit_bytes=$((64 * 1024 * 1024))

fail() {
    echo "error: $*" >&2
    exit 1
}

python_version_of() {
    "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

usage() {
    sed -n '2,/^set -/p' "$0" | sed '$d; s/^# \{0,1\}//'
}

pack() { # FILE
    local archive scratch sdist given=()
    archive=$(mkdir -p "$(dirname "$1")" && cd "$(dirname "$1")" && pwd)/$(basename "$1")
    scratch=$(mktemp -d)
    sdist=${MOEEDGE_LLAMA_SDIST:-}
    if [ -z "$sdist" ]; then
        "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$scratch" \
            "llama-cpp-python==$version"
        sdist="$scratch/llama_cpp_python-$version.tar.gz"
    fi
    echo "$sha256  $sdist" | sha256sum --check --quiet || fail "$sdist is not llama-cpp-python $version"
    MOEEDGE_LLAMA_SDIST=$sdist "$python" "$root/moeedge/native/cmake/fetch_headers.py" \
        "$version" "$sha256" "$scratch/pack/ggml-headers"
    # the library, the CPU, CUDA and RPC backends and what their CMake files name; no tools, tests, models, documents
    local top=llama_cpp_python-$version
    local llama=$top/vendor/llama.cpp
    tar -C "$scratch/pack" -xf "$sdist" --wildcards --no-wildcards-match-slash \
        "$top"/{CMakeLists.txt,pyproject.toml,PKG-INFO,README.md,LICENSE.md,llama_cpp} \
        "$llama"/{CMakeLists.txt,LICENSE,licenses,cmake,common,include,src,vendor} "$llama"/ggml/{CMakeLists.txt,cmake,include} \
        "$llama"/ggml/src/{CMakeLists.txt,'*.c','*.cpp','*.h','*.in',ggml-cpu,ggml-cuda,ggml-rpc}
    mv "$scratch/pack/$top" "$scratch/pack/llama-cpp-python"
    if [ -n "$python_version" ]; then
        given=(--python-version "$python_version" --implementation cp)
        for glibc in 17 24 27 28 34; do given+=(--platform "manylinux_2_${glibc}_$(uname -m)"); done
        given+=(--platform "manylinux2014_$(uname -m)")
    fi
    echo "${python_version:-$(python_version_of)}" >"$scratch/pack/python-version"
    "$python" -m pip download --quiet --only-binary=:all: "${given[@]}" --dest "$scratch/pack/wheels" "${wheels[@]}"
    tar -C "$scratch/pack" -cJf "$archive" .
    rm -rf "$scratch"
    local size
    size=$(stat -c %s "$archive")
    echo "$archive: $((size / 1024)) KiB" >&2
    [ "$size" -lt "$limit_bytes" ] || fail "that is more than 64 MiB"
}

# nvcc may be installed and not on PATH
find_nvcc() {
    local folder
    command -v nvcc >/dev/null && return
    for folder in "${CUDA_HOME:-/usr/local/cuda}"/bin /usr/local/cuda-*/bin /opt/cuda/bin; do
        if [ -x "$folder/nvcc" ]; then
            export PATH="$folder:$PATH"
            echo "nvcc is not on PATH; using $folder/nvcc" >&2
            return
        fi
    done
    fail "nvcc is neither on PATH nor in \$CUDA_HOME/bin, /usr/local/cuda*/bin or /opt/cuda/bin: install the CUDA toolkit"
}

# what a toolkit without cuBLAS or the driver's stub needs beyond it: the former comes as a Python package, too
toolkit_options() {
    local toolkit
    toolkit=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
    if [ ! -d "$toolkit/include" ]; then # nvcc is a script that starts the toolkit's
        toolkit=/usr/local/cuda
    fi
    if [ -z "$(find -L "$toolkit" -name libcuda.so -print -quit)" ]; then
        echo "$toolkit has no stub of the driver's libcuda: compiling without virtual memory (GGML_CUDA_NO_VMM)" >&2
        echo "-DGGML_CUDA_NO_VMM=ON"
    fi
    if [ -z "$(find -L "$toolkit" -name cublas_v2.h -print -quit)" ]; then
        "$python" "$here/find_cublas.py"
    fi
}

build() { # DIR
    local start=$SECONDS options=(-DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF -DGGML_RPC=ON -DGGML_NATIVE=ON) line
    mkdir -p "$1"
    if [ ! -d "$1/llama-cpp-python" ]; then
        [ -n "$archive" ] || fail "--build needs --archive FILE, which --pack makes"
        tar -C "$1" -xf "$archive"
    fi
    local packed
    packed=$(cat "$1/python-version" 2>/dev/null || python_version_of)
    [ "$packed" = "$(python_version_of)" ] ||
        fail "the archive has wheels for Python $packed, $python is $(python_version_of): name another by \$PYTHON, or --pack with --python"
    if [ ! -e "$1/site/.complete" ]; then
        "$python" -m pip install --quiet --no-index --no-deps --no-warn-script-location --upgrade \
            --target "$1/site" "$1"/wheels/*.whl
        touch "$1/site/.complete"
    fi
    export PYTHONPATH="$1/site" PATH="$1/site/bin:$PATH"
    if [ -z "$dry_run" ]; then
        find_nvcc
        [ -n "$arch" ] || arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
        [ -n "$arch" ] || fail "nvidia-smi names no GPU: give its compute capability by --arch"
        echo "compiling for compute capability $arch" >&2
        # one architecture and no PTX; flash attention for the KV cache's default type alone; nothing to compress
        options+=(-DGGML_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch-real" -DGGML_CUDA_FA_QUANTS=f16-f16
            -DGGML_CUDA_NCCL=OFF -DGGML_CUDA_COMPRESSION_MODE=none)
        while IFS= read -r line; do options+=("$line"); done < <(toolkit_options)
    fi
    # a folder of its own for the objects, so that a second call goes on where the first was cut off
    local settings=("--config-settings=build-dir=$1/build-llama")
    for line in "${options[@]}"; do settings+=("--config-settings=cmake.args=$line"); done
    CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL=${jobs:-$(nproc)} "$python" -m pip install --verbose --no-index --no-deps \
        --no-build-isolation --upgrade --target "$1/site" "${settings[@]}" "$1/llama-cpp-python" >"$out/llama.log" 2>&1 ||
        { tail -n 60 "$out/llama.log" >&2; fail "llama-cpp-python did not compile; $out/llama.log has all of it"; }
    mkdir -p "$1/build-moeedge"
    cp -r "$1/ggml-headers" "$1/build-moeedge/"
    cmake -G Ninja -S "$root/moeedge/native" -B "$1/build-moeedge" -DMOEEDGE_WERROR=OFF "-DPython_EXECUTABLE=$(command -v "$python")" >"$out/moeedge.log"
    cmake --build "$1/build-moeedge" >>"$out/moeedge.log" || { tail -n 60 "$out/moeedge.log" >&2; fail "moeedge did not compile"; }
    echo "built in $((SECONDS - start)) s" >&2
}

check() { # DIR
    mkdir -p "$1"
    if [ -d "$1/site/llama_cpp" ]; then
        export PYTHONPATH="$1/site:$root" PATH="$1/site/bin:$PATH" MOEEDGE_LIBRARY="$1/build-moeedge/libmoeedge.so"
        LD_LIBRARY_PATH="$(sed -n 's/^CUDA_cublas\(Lt\)\{0,1\}_LIBRARY:.*=\(.*\)\/[^/]*$/\2/p' "$1/build-llama/CMakeCache.txt" |
            sort -u | tr '\n' ':')${LD_LIBRARY_PATH:-}"
        export LD_LIBRARY_PATH
    elif [ -n "$dry_run" ]; then
        export PYTHONPATH="$root"
    else
        fail "nothing was built in $1: --build $1 first"
    fi
    export MOEEDGE_CACHE="$1/cache"
    local device=CUDA0 ggml_device=CUDA0 dry=() status=0 embd=2048
    local modes=stock-ar,stock-sd,moeedge-ar,moeedge,stock-ncmoe,stock-ncmoe-sd
    if [ -n "$dry_run" ]; then
        device=emulated:threads=1
        ggml_device=CPU
        dry=(--dry-run) embd=256 modes=${modes%%,stock-nc*} # whole layers need a GPU
    fi
    cd "$root"
    shopt -s nullglob
    local on_gpu=(tests/gpu/test_lossless*.py) # with attention on the GPU
    shopt -u nullglob
    if [ -z "$tests_only$bench_only" ]; then
        part micro "$python" -m tests.gpu.micro --device "$ggml_device" "${dry[@]}" --out "$out/micro.json"
    fi
    if [ -z "$micro_only$bench_only" ]; then
        MOEEDGE_TEST_DEVICE=$device part tests "$python" -m pytest -p no:cacheprovider -q --junitxml="$out/tests.xml" \
            ${tests_filter:+-k "$tests_filter"} tests/lossless/test_hybrid_greedy.py tests/native/test_cache_stress.py \
            "${on_gpu[@]}"
    fi
    if [ -z "$micro_only$tests_only" ]; then
        local model=$1/models/widened-$embd.gguf
        mkdir -p "$1/models"
        [ -e "$model" ] || part model "$python" -m moeedge lab widen "$model" --embd "$embd" --ff $((embd * 3 / 8)) --sparse
        # shellcheck disable=SC2016 # the inner shell expands them
        part bench bash -c 'exec "${@:2}" -o json >"$1"' - "$out/bench.json" "$python" -m moeedge bench -m "$model" \
            -md models/bundled/draft.gguf -dev "$device" --modes "$modes" --dataset toy --limit "$repeats" -r 1 \
            -n "$n_predict" --ignore-eos --draft-max 8 --policy spac,static --cache-ratio "$ratio" -t "$threads"
    fi
    return "$status"
}

# runs a part of the checks, with a log of its own; sets `status` where it fails
part() { # NAME COMMAND...
    local name=$1 start=$SECONDS code=0
    shift
    echo "$name:" >&2
    timeout --foreground "$limit" "$@" 2>&1 | tee "$out/$name.log" || code=$?
    if [ "$code" != 0 ]; then
        status=1
        echo "$name: $([ "$code" = 124 ] && echo "ended after $limit s" || echo "failed with $code"), after $((SECONDS - start)) s" >&2
    fi
}

main() {
    mode='' folder='' archive='' arch='' python_version='' dry_run='' bench_only='' tests_only='' micro_only=''
    tests_filter='' jobs='' out='' limit=0
    repeats=5 n_predict=96 ratio=0.17 threads=0
    while [ $# -gt 0 ]; do
        case "$1" in
        --pack | --build | --check | --all) mode=${1#--} folder=${2:?"$1 needs a path"} && shift ;;
        --archive) archive=${2:?} && shift ;;
        --arch) arch=${2:?} && shift ;;
        --jobs) jobs=${2:?} && shift ;;
        --python) python_version=${2:?} && shift ;;
        --tests) tests_filter=${2:?} && shift ;;
        --dry-run) dry_run=yes ;;
        --bench-only) bench_only=yes ;;
        --tests-only) tests_only=yes ;;
        --micro-only) micro_only=yes ;;
        --limit) limit=${2:?} && shift ;;
        --out) out=${2:?} && shift ;;
        --repeats) repeats=${2:?} && shift ;;
        --n-predict) n_predict=${2:?} && shift ;;
        --ratio) ratio=${2:?} && shift ;;
        --threads) threads=${2:?} && shift ;;
        -h | --help) usage && exit ;;
        -*) fail "unknown option $1; --help lists them" ;;
        *) mode=all folder=$1 ;;
        esac
        shift
    done
    [ -n "$mode" ] || { usage >&2 && exit 2; }
    if [ "$mode" != pack ]; then
        folder=$(mkdir -p "$folder" && cd "$folder" && pwd)
        out=$(mkdir -p "${out:-$folder/out}" && cd "${out:-$folder/out}" && pwd)
    fi
    case "$mode" in
    pack | build | check) "$mode" "$folder" ;;
    all)
        if [ -z "$archive" ]; then
            archive=$folder/pack.tar.xz
            [ -e "$archive" ] || pack "$archive"
        fi
        build "$folder"
        check "$folder"
        ;;
    esac
}

main "$@" # bash has read the whole file by now: it may be edited while this runs
exit
