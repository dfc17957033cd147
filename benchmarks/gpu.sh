#!/usr/bin/env bash
# benchmarks/gpu.sh DIR [more flags of tokenfleet]: figures of a model of which only config.json and the tokenizer are needed.
# First the bare engine, then the whole fleet over HTTP. Variables:
#   PYTHON   the interpreter (default: .venv/bin/python)
#   LOADS    "STREAMS,REQUESTS,IN,OUT ..." (default: 1, 32 and 256 streams, 128/256, 512/256 and 128/512 tokens)
#   SAMPLED  the load that runs again with temperature 0.8 and top-p 0.95 (default: the last of LOADS)
#   CLIENT   vllm: `vllm bench serve`, the default where it is installed; own: benchmarks/serve.py, in PROCESSES processes
#   URL      a server that runs already, a peer's too: only the loads, with MODEL_NAME (default: m)
#   PEER     a file with a peer's figures by the same client: ratios to these at the end
#   START_S  how long the fleet may take to start, compiling (default: 1800)
#   OUT      where figures and logs go (default: a new folder)
# Settings are read from variables, as always: DTYPE, DEVICE, NUM_GATEWAYS. A minute on CPU, with a small model:
#   DEVICE=cpu LOADS="1,4,32,16 8,16,64,16" ENGINE="--rows 1,8 --contexts 128" benchmarks/gpu.sh DIR
set -euo pipefail
dir=$(readlink -f "$1"); shift
root=$(dirname "$(dirname "$(readlink -f "$0")")")
cd "$root"
python=${PYTHON:-.venv/bin/python} name=${MODEL_NAME:-m} out=${OUT:-$(mktemp -d)}
loads=${LOADS:-"1,8,128,256 32,128,512,256 256,768,512,256 256,512,128,512"}
sampled=${SAMPLED:-${loads##* }}
cores=$(nproc)
client=${CLIENT:-$("$python" -c 'import importlib.util as u; print("vllm" if u.find_spec("vllm") else "own")')}
export LOAD_FORMAT=${LOAD_FORMAT:-dummy} NUM_GATEWAYS=${NUM_GATEWAYS:-$(((cores + 3) / 4))} NUM_JOBS=0 LOG_LEVEL=${LOG_LEVEL:-warning}
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000} # as engine processes have it
export MODEL_ID=$dir SERVED_MODEL_NAME=$name HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$out"

with_vllm() { # streams requests in out [temperature top-p]
    "$python" -m vllm.entrypoints.cli.main bench serve --backend openai --base-url "$url" --model "$name" --tokenizer "$dir" \
        --dataset-name random --random-input-len "$3" --random-output-len "$4" --num-prompts "$2" --max-concurrency "$1" --ignore-eos \
        ${5:+--temperature "$5" --top-p "$6"} \
        --percentile-metrics ttft,tpot,itl --metric-percentiles 50,99 2>>"$out/client.log" |
        grep -E 'Failed|Output token throughput|Median TTFT|P99 TTFT|Median TPOT|Median ITL|P99 ITL' | sed "s/^/streams=$1 in=$3 out=$4${5:+ sampled} | /"
}

drive() {
    echo "client: $client"
    if [ "$client" = vllm ]; then
        with_vllm 32 64 64 16 >/dev/null
        for load in $loads; do with_vllm ${load//,/ }; done
        with_vllm ${sampled//,/ } 0.8 0.95
    else
        "$python" -m benchmarks.serve "$url/v1/completions" --model "$name" --processes "${PROCESSES:-$(((cores + 3) / 4))}" \
            $(printf -- '--load %s ' $loads)
        "$python" -m benchmarks.serve "$url/v1/completions" --model "$name" --processes "${PROCESSES:-$(((cores + 3) / 4))}" \
            --load "$sampled" --sampled
    fi
}

fleet() { # starts one, and returns when it serves
    "$python" -m deploy.cli serve --hostname 127.0.0.1 --port "$1" "${@:2}" >"$out/fleet.log" 2>&1 &
    pid=$!
    trap 'kill $pid 2>/dev/null; wait $pid 2>/dev/null || true' EXIT
    local begun=$SECONDS
    until grep -q '^Tokenfleet serves' "$out/fleet.log"; do
        if ((SECONDS - begun >= ${START_S:-1800})) || ! kill -0 $pid 2>/dev/null; then
            tail -30 "$out/fleet.log" >&2
            echo "the fleet does not serve after $((SECONDS - begun)) s: $out/fleet.log" >&2
            exit 1
        fi
        sleep 0.5
    done
}

if [ -z "${URL:-}" ]; then
    "$python" -m benchmarks.engine ${ENGINE:-} "$@" 2>"$out/engine.log" | tee "$out/engine.txt" || { tail -30 "$out/engine.log" >&2; exit 1; }
    port=$("$python" -c 'from tests.support.machine.ports import free_port; print(free_port())')
    url=http://127.0.0.1:$port
    fleet "$port" "$@"
else
    url=${URL%/}
fi
drive | tee "$out/figures.txt"
[ -z "${PEER:-}" ] || "$python" -m benchmarks.ratios "$PEER" "$out/figures.txt"
echo "figures and logs: $out"
