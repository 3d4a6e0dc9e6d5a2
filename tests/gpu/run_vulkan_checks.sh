#!/usr/bin/env bash
# Checks moeedge on ggml's Vulkan backend with Mesa's software driver (lavapipe): a third party's GPU backend, without a GPU.
#
#   run_vulkan_checks.sh [--folder DIR]          the list of cases; the record goes to docs/benchmarks/vulkan-checks.json
#   run_vulkan_checks.sh --fuzz 200 [--seed N]   that many random settings; greedy answers must equal stock's
#   run_vulkan_checks.sh --slice                 the few cases that the default test suite runs
#
#   --model NAME, --kind KIND, --out FILE, --limit-s SECONDS     see python -m tests.gpu.vulkan_checks --help
#
# Installs nothing. It needs Mesa's driver (Debian and Ubuntu: mesa-vulkan-drivers), a C compiler, and the prebuilt
# backend: $MOEEDGE_VULKAN_BACKEND names the library, or libggml-vulkan.so.xz lies in the folder `vulkan` next to
# $MOEEDGE_DATA. Exit status: 0 all passed, 1 a case failed, 77 skipped because one of these is missing. $PYTHON names
# another interpreter than python3.
#
# The record is written after each model's process, and a further call goes on where the last one was cut. It has (schema
# moeedge-vulkan-checks-1) `environment` as in docs/bench.md, `driver`, and for each of `cases` the model, the kind, the
# settings (seeds included), `error` (null: passed), `seconds` and `figures`. Reference is stock llama.cpp with the same
# layers on the device, in the same process; a difference passes only as near-ties of stock's logits, and its answer is
# listed. Models are tiny and have random weights.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}

usage() {
    sed -n '2,/^set -/p' "$0" | sed '$d; s/^# \{0,1\}//'
}

folder='' arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage && exit ;;
    --folder) folder=${2:?"--folder needs a path"} && shift ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
if [ -z "$folder" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
folder=$(mkdir -p "$folder" && cd "$folder" && pwd)
if [ -z "${MOEEDGE_DATA:-}" ] && [ -d "$root/../shared/data" ]; then
    MOEEDGE_DATA=$(cd "$root/../shared/data" && pwd)
    export MOEEDGE_DATA
fi
cd "$root"
"$python" -m tests.gpu.vulkan_checks --folder "$folder" "${arguments[@]}"
