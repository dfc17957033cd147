#!/usr/bin/env bash
# benchmarks/gpu/run.sh FOLDER [--part PART]...: all that a card must show, and FOLDER/report.md, which needs no second look.
#
# Parts, in this order: machine, tests, engine, fleet, peer, starts, report. A part is a list of items. An item has a time limit, a log
# FOLDER/ITEM.log and, once it is over, FOLDER/ITEM.done with its exit status and seconds. What is done is skipped, so a run that was cut off,
# however it was, goes on when it is called again; `rm FOLDER/ITEM.done` repeats an item. The report is written anew after each item.
#
# Variables:
#   BUDGET_S  stop in time for a limit of the caller's (570 for one of 10 minutes); the default is none. Exit status 3: call it again
#   COPY_TO   after each item the report and logs.tar.gz, the whole folder, are copied there
#   PYTHON    the interpreter (default: .venv/bin/python); PEER_PYTHON one that has vLLM (default: PYTHON)
#   DEVICE    cuda (default) or cpu, a rehearsal: with the shape tiny, other loads, and imitations in tests/gpu
#   SHAPES    of shapes.py, the largest first (default: m8 m135); TOKENIZER: see there
#   LOADS     "STREAMS,REQUESTS,IN,OUT ..." (default: 1, 32 and 256 streams, 128/256, 512/256, 512/256 and 128/512 tokens)
#   START_S   how long a server may take to start, compiling (default: 500)
# A rehearsal, some minutes on two cores: DEVICE=cpu benchmarks/gpu/run.sh /tmp/rehearsal
# On a machine that is lent for 10 minutes a command, with $OUT copied back: BUDGET_S=570 COPY_TO=$OUT benchmarks/gpu/run.sh gpu-report
set -uo pipefail
usage() { sed -n 's/^# \{0,1\}//p' "$0" | head -8; exit 2; }
(($# > 0)) || usage
mkdir -p "$1" || exit
out=$(readlink -f "$1"); shift
parts=()
while (($#)); do
    [ "$1" = --part ] && (($# > 1)) || usage
    parts+=("$2"); shift 2
done
((${#parts[@]})) || parts=(machine tests engine fleet peer starts)
for part in "${parts[@]}"; do
    [[ " machine tests engine fleet peer starts report " == *" $part "* ]] || usage
done
cd "$(dirname "$(readlink -f "$0")")/../.." || exit
python=${PYTHON:-.venv/bin/python}
peer_python=${PEER_PYTHON:-$python}
export DEVICE=${DEVICE:-cuda}
on_cuda() { [ "$DEVICE" = cuda ]; }
if on_cuda; then
    shapes=${SHAPES:-m8 m135} loads=${LOADS:-"1,8,128,256 32,128,512,256 256,768,512,256 256,512,128,512"}
    engine_flags="--rows 1,32,256 --contexts 240,368,624" profiled=1,32,256 marked="gpu and not slow"
else
    shapes=${SHAPES:-tiny} loads=${LOADS:-"1,4,32,16 8,16,64,16"}
    engine_flags="--rows 1,8 --contexts 128" profiled=1,8 marked=slow
    export KV_CACHE_BYTES=${KV_CACHE_BYTES:-256MiB} VLLM_CPU_KVCACHE_SPACE=1
fi
small=${shapes##* } large=${shapes%% *}
cores=$(nproc)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 LOAD_FORMAT=dummy NUM_GATEWAYS=${NUM_GATEWAYS:-$(((cores + 3) / 4))} LOG_LEVEL=${LOG_LEVEL:-warning}
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000} # as engine processes have it
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING VLLM_USE_FLASHINFER_SAMPLER=0
has() { "$1" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$2'))" 2>/dev/null; }
has_vllm() { [ -n "${peer_has_vllm:=$(has "$peer_python" vllm && echo yes || echo no)}" ] && [ "$peer_has_vllm" = yes ]; }

# --- items ----------------------------------------------------------------------------------------------------

left_s() { echo $((${BUDGET_S:-100000} - SECONDS)); }
is_done() { [ -e "$out/$1.done" ]; }
mark() { echo "$2 $3" >"$out/$1.done.new" && mv "$out/$1.done.new" "$out/$1.done"; } # item, status, seconds

report() {
    "$python" -m benchmarks.gpu.report "$out" >"$out/report.log" 2>&1 || tail -5 "$out/report.log" >&2
    [ -z "${COPY_TO:-}" ] || {
        cp "$out/report.md" "$COPY_TO/" && tar czf "$COPY_TO/logs.new" -C "$out" --exclude=models --exclude='caches*' . &&
            mv "$COPY_TO/logs.new" "$COPY_TO/logs.tar.gz"
    }
}

out_of_budget() {
    stop_server
    report
    echo "the budget of ${BUDGET_S} s is spent before $1: call it again"
    exit 3
}

# item NAME LIMIT_S COMMAND...: run it once. Where less than half of its limit is left of the budget, or the budget cuts it off, the next call
# runs it.
item() {
    local name=$1 limit=$2 begun=$SECONDS left status
    shift 2
    is_done "$name" && return
    left=$(($(left_s) - 10))
    ((left * 2 >= limit)) || out_of_budget "$name"
    echo "$(date +%T) $name"
    clock "$name"
    timeout --kill-after=10 $((left < limit ? left : limit)) "$@" >"$out/$name.log" 2>&1 </dev/null
    status=$?
    ((status != 124 && status != 137 || left >= limit)) || out_of_budget "the end of $name"
    ((status == 0)) || echo "         exit status $status: $out/$name.log" >&2
    mark "$name" $status $((SECONDS - begun))
    report
}

clock() { # the card's clocks and temperature before an item: a card that is throttled explains a figure
    on_cuda && echo "$1: $(nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used,clocks_event_reasons.active \
        --format=csv,noheader 2>&1 | head -1)" >>"$out/clocks.txt"
}

# --- servers --------------------------------------------------------------------------------------------------

server=
stop_server() {
    [ -n "$server" ] || return 0
    kill "$server" 2>/dev/null
    for _ in $(seq 100); do kill -0 "$server" 2>/dev/null || break; sleep 0.2; done
    kill -KILL -- "-$server" 2>/dev/null
    wait "$server" 2>/dev/null
    server=
}
trap stop_server EXIT
trap 'exit 143' TERM INT

# start_server NAME ours|vllm SHAPE [FLAGS]: returns when it serves, and writes NAME.start: how many seconds that took. The server leads a
# process group of its own, which `stop_server` ends.
start_server() {
    local name=$1 kind=$2 dir=$out/models/$3 begun left
    shift 3
    port=$("$python" -c 'from tests.support.machine.ports import free_port; print(free_port())') url=http://127.0.0.1:$port
    left=$(($(left_s) - 10))
    begun=$(date +%s.%N)
    set -m
    if [ "$kind" = ours ]; then
        MODEL_ID=$dir SERVED_MODEL_NAME=$dir "$python" -m deploy.cli serve --hostname 127.0.0.1 --port "$port" "$@" >"$out/$name.server.log" 2>&1 </dev/null &
    else
        "$peer_python" -m vllm.entrypoints.cli.main serve "$dir" --load-format dummy --dtype bfloat16 --max-model-len 4096 \
            --host 127.0.0.1 --port "$port" "$@" >"$out/$name.server.log" 2>&1 </dev/null &
    fi
    server=$!
    set +m
    local until_s=$((SECONDS + (left < ${START_S:-500} ? left : ${START_S:-500})))
    until "$python" -c "import urllib.request as u; u.urlopen('$url/health', timeout=2)" 2>/dev/null; do
        if ! kill -0 "$server" 2>/dev/null; then
            echo "         it ends instead of serving: $out/$name.server.log" >&2
            stop_server
            return 1
        fi
        if ((SECONDS >= until_s)); then
            ((left < ${START_S:-500})) && out_of_budget "the start of $name"
            echo "         it does not serve after ${START_S:-500} s: $out/$name.server.log" >&2
            stop_server
            return 1
        fi
        sleep 0.2
    done
    echo "$(date +%s.%N) $begun" | awk '{printf "%.1f\n", $1 - $2}' >"$out/$name.start"
}

# drive NAME SHAPE STREAMS,REQUESTS,IN,OUT [sampled]: one load. `vllm bench serve` where it is installed, else benchmarks/serve.py.
drive() {
    local dir=$out/models/$2 numbers=${3//,/ } sampled=${4:-}
    read -r streams requests input output <<<"$numbers"
    if has_vllm; then
        "$peer_python" -m vllm.entrypoints.cli.main bench serve --backend openai --base-url "$url" --model "$dir" --tokenizer "$dir" \
            --dataset-name random --random-input-len "$input" --random-output-len "$output" --num-prompts "$requests" \
            --max-concurrency "$streams" --seed $((2 * (input * 1024 + streams) + ${#sampled} % 2)) --ignore-eos ${sampled:+--temperature 0.8 --top-p 0.95} \
            --percentile-metrics ttft,tpot,itl --metric-percentiles 50,99 2>&1 |
            sed -E "/Failed|Output token throughput|Median TTFT|P99 TTFT|Median TPOT|Median ITL|P99 ITL/s/^/streams=$streams in=$input out=$output${sampled:+ sampled} | /"
    else
        "$python" -m benchmarks.serve "$url/v1/completions" --model "$dir" --processes $(((cores + 3) / 4)) --load "$3" ${sampled:+--sampled}
    fi
}
export -f drive has has_vllm

# loads_of NAME ours|vllm SHAPE LOADS [FLAGS]: all loads, greedy then sampled, and structured output, of one server, which is started if some
# of them are not done.
loads_of() {
    local name=$1 kind=$2 shape=$3 chosen=$4 load structured=
    shift 4
    [ -e "$out/$name.failed" ] && return
    [ "$name" != "$kind-$shape" ] || structured=$name-structured
    local items=$structured
    for load in $chosen; do items="$items $name-$load $name-$load-sampled"; done
    for load in $items; do is_done "$load" || break; done
    is_done "$load" && return
    (($(left_s) >= 100)) || out_of_budget "$name"
    echo "$(date +%T) $name starts"
    clock "$name starts"
    start_server "$name" "$kind" "$shape" "$@" || { touch "$out/$name.failed"; report; return; }
    export url out python peer_python peer_has_vllm cores
    for load in $chosen; do item "$name-$load" 150 bash -c 'drive "$@"' drive "$name" "$shape" "$load"; done
    for load in $chosen; do item "$name-$load-sampled" 150 bash -c 'drive "$@"' drive "$name" "$shape" "$load" sampled; done
    [ -z "$structured" ] || item "$structured" 200 "$python" -m benchmarks.gpu.grammar "$url/v1/completions" --model "$out/models/$shape" --runs 2
    stop_server
}

# --- parts ----------------------------------------------------------------------------------------------------

export VERSIONS='import importlib.metadata as m, sys
names = "torch triton flashinfer-python transformers xgrammar llguidance numpy vllm".split()
print(sys.executable, *(f"{one.name} {one.version}" for one in m.distributions() if one.name in names), sep=", ")'

machine() {
    item machine 120 bash -c 'git log -1 --format="commit %h %s"; nvidia-smi 2>&1 | head -20
        "$0" -m torch.utils.collect_env 2>/dev/null | grep -v "^Vulnerability\|^Flags"
        for python; do "$python" -c "$VERSIONS"; done' "$python" "$python" "$peer_python"
    item doctor 120 env MODEL_ID="$out/models/$large" "$python" -m deploy.cli doctor
}

tests() {
    local file
    for file in kernels flashinfer_names attention engine run_ahead quantization speculation models memory streams captured_memory determinism nccl failures fleet; do
        item "test_$file" "$([[ $file = attention || $file = models || $file = fleet ]] && echo 540 || echo 300)" \
            "$python" -m pytest -p no:cacheprovider -p no:randomly -v --color=no --tb=short -rfE -m "$marked" "tests/gpu/test_$file.py"
    done
}

engine() {
    local shape
    for shape in $shapes; do
        item "engine-$shape" 240 env MODEL_ID="$out/models/$shape" "$python" -m benchmarks.engine $engine_flags
        item "profile-$shape" 180 env MODEL_ID="$out/models/$shape" "$python" -m benchmarks.gpu.profile_steps "$out" "$profiled"
    done
    ! on_cuda || item "engine-$large-fp8" 240 env MODEL_ID="$out/models/$large" QUANTIZE=fp8 "$python" -m benchmarks.engine $engine_flags
}

fleet() {
    local shape
    for shape in $shapes; do loads_of "ours-$shape" ours "$shape" "$loads"; done
    ! on_cuda || loads_of "ours-$large-fp8" ours "$large" "$(grep -o '256,[^ ]*' <<<"$loads")" --quantize fp8
}

peer() {
    local shape
    has_vllm || { echo "vLLM is not installed in $peer_python: no figures of a peer"; return; }
    for shape in $shapes; do loads_of "vllm-$shape" vllm "$shape" "$loads"; done
    ! on_cuda || loads_of "vllm-$large-fp8" vllm "$large" "$(grep -o '256,[^ ]*' <<<"$loads")" --quantization fp8
}

# Starts with empty caches of compiled code, then with full ones; and kills of a worker, whose successor captures its graphs anew.
starts() {
    local kind name
    export TORCHINDUCTOR_CACHE_DIR=$out/caches/inductor TRITON_CACHE_DIR=$out/caches/triton FLASHINFER_WORKSPACE_BASE=$out/caches/flashinfer
    for kind in cold warm; do
        name=start-$kind
        is_done "$name" && continue
        (($(left_s) >= 100)) || out_of_budget "$name"
        [ $kind = warm ] || rm -rf "$out/caches"
        echo "$(date +%T) $name"
        local begun=$SECONDS status=0
        start_server "$name" ours "$small" || status=$?
        stop_server
        mark "$name" $status $((SECONDS - begun))
        report
    done
    item kills 400 env MODEL_ID="$out/models/$small" "$python" -m benchmarks.pauses --kill workers --workers 1 --streams 1 --kills 3
}

is_done models || {
    "$python" -m benchmarks.gpu.shapes "$out/models" ${TOKENIZER:+"$TOKENIZER"} || exit 1
    mark models 0 0
}
for part in "${parts[@]}"; do
    "$part"
done
report
echo "all done: $out/report.md"
