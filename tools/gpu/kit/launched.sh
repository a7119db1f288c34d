#!/bin/sh
# kvtier's own checks on servers that `kvtier launch` starts: on the first card a long session over
# kill -9; beside it, on the last, selfcheck of two models and watch.
#
#   launched.sh OUT WORK FIRST-CARD LAST-CARD
set -u
mkdir -p "$1" "$2"
out=$(cd "$1" && pwd) work=$(cd "$2" && pwd) first=$3 last=$4
cd "$KIT"
# The probe's dummy weights: with SGLang's own, every prompt has the same answer.
export SGLANG_PLUGINS=kvtier,kvtier_gpu_probe SGLANG_DSV4_FP4_EXPERTS=0

arguments() { # NAME of plan.py
    python3 -c "from cases import plan; print(*plan.ENGINE, *plan.$1)"
}

launch() { # NAME CARD PORT MODEL ARGUMENTS: the command line, a word each
    printf '%s\n' env CUDA_VISIBLE_DEVICES="$2" kvtier launch generic --model "$KIT/models/$4" \
        --store "$work/$1" -- --port "$3" --load-format dummy --dtype bfloat16 --random-seed 7 \
        --skip-tokenizer-init --skip-server-warmup $(arguments "$5")
}

restored() { # NAME CARD PORT MODEL ARGUMENTS
    # shellcheck disable=SC2046 # words without spaces
    kvtier bench restore --url "http://127.0.0.1:$3" --tokens 100000 --json -- \
        $(launch "$@") >"$out/$1.json" 2>"$out/$1.txt"
    echo "$1: bench restore, status $?"
}

checked() { # NAME CARD PORT MODEL ARGUMENTS
    # shellcheck disable=SC2046
    $(launch "$@") >"$out/$1.log" 2>&1 &
    server=$!
    seconds=0
    until grep -q 'ready after' "$out/$1.log" || [ $((seconds += 1)) -gt 240 ]; do
        sleep 1
    done
    kvtier watch 20 --json >"$out/$1.watch.json" &
    watch=$!
    kvtier selfcheck "http://127.0.0.1:$3" --tokens 20000 --json >"$out/$1.json" 2>"$out/$1.txt"
    echo "$1: selfcheck, status $?"
    wait "$watch"
    kvtier inspect "$work/$1" >>"$out/$1.txt"
    kill "$server"
    wait "$server"
    echo "$1: launch ended with status $?"
}

restored dense "$first" 31000 dense DENSE &
{
    checked swa "$last" 31001 swa SWA
    checked v4.1 "$last" 31002 dsv41 V4
} &
wait
