#!/usr/bin/env bash
# llama.cpp's own tests with moeedge's backend attached: every architecture (test-llama-archs) and several contexts at
# once (test-thread-safety). Builds them, unmodified, from the pinned source distribution in FOLDER (about 4 minutes).
#
# Usage: run_llama_cpp_tests.sh FOLDER      (with moeedge installed; needs cmake and a C++ compiler)
set -euo pipefail

folder=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n 's/^set(MOEEDGE_LLAMA_CPP_PYTHON_VERSION "\(.*\)")$/\1/p' "$here/../../moeedge/native/CMakeLists.txt")
library=$(moeedge devices --library)
model=$(python3 -c 'from moeedge.paths import bundled_target; print(bundled_target())')

source="$folder/llama_cpp_python-$version/vendor/llama.cpp"
if [ ! -d "$source" ]; then
    pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$folder" "llama-cpp-python==$version"
    tar -C "$folder" -xf "$folder/llama_cpp_python-$version.tar.gz"
fi
build="$folder/build"
cmake -S "$source" -B "$build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_TESTS=ON \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF >"$folder/configure.log"
cmake --build "$build" --parallel --target test-llama-archs test-thread-safety >"$folder/build.log"
cc -shared -fPIC -o "$folder/libload_backends.so" "$here/load_backends.c" \
    -L"$build/bin" -lggml -Wl,-rpath,"$build/bin"

run() {
    echo "+ $*"
    env GGML_BACKEND_PATH="$library" LD_PRELOAD="$folder/libload_backends.so" "$@" >"$folder/run.log" 2>&1 || {
        tail -n 40 "$folder/run.log"
        exit 1
    }
    grep --max-count=1 "loaded MOEEDGE backend" "$folder/run.log" # without this line the test would prove nothing
    tail -n 1 "$folder/run.log"
}
run "$build/bin/test-llama-archs" -s 42
run "$build/bin/test-thread-safety" -m "$model" -ngl 99 -p "The meaning of life is" -n 128 -c 256 -ub 32 -np 4 -t 2
