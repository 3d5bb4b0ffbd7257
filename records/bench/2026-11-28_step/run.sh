# On a card, in the repository's root, with .gpu from pack.sh: bash records/bench/2026-11-28_step/run.sh [LINE...]
# LINE: some of those below, by name; without any, all, in order, as far as LIMIT seconds suffice.
# DRY=1: tiny sizes on a CPU. PLACE: a folder instead of .gpu. Its logs lie in $OUT
cd "$(dirname "$0")/../../.."
export OUT=${OUT:-/tmp/out} PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore TORCHINDUCTOR_CACHE_DIR=${CACHE:-/tmp/inductor}
place=$(realpath "${PLACE:-.gpu}") sweep=$PWD/records/bench/2026-11-26_h100_5e9ffa1/sweep.py root=$PWD lines=" $* " limit=${LIMIT:-570}
export TIKTOKEN_CACHE_DIR=$place/tiktoken DATA=$place/data
mkdir -p $OUT
began=$(date +%s)

# Tiny sizes replace those of a line
if [ "$DRY" ]; then
    tiny=',"preset":"laptop","device":"cpu","compile":"off","fp8":false,"n_layer":2,"n_head":2,"n_embd":32,"seq_len":64,"batch_tokens":512'
    flags="--preset laptop --device cpu --n_layer 2 --n_head 2 --n_embd 32 --seq_len 64 --batch_tokens 512"
    nano="--device=cpu --compile=False --dtype=float32 --n_layer=2 --n_head=2 --n_embd=32 --block_size=64 --batch_size=8 --gradient_accumulation_steps=2"
    device=cpu slow=4
else
    flags="--preset gpt2-small --batch_tokens 131072"
    nano="--batch_size=32 --gradient_accumulation_steps=16"
    device=cuda slow=1
fi

line() { # NAME SECONDS LOG COMMAND...: if it was asked for, and so much time is left
    local name=$1 seconds=$2 log=$OUT/$3 start=$(($(date +%s) - began)) code; shift 3
    [ "$lines" = "  " ] || [[ $lines == *" $name "* ]] || return
    [ $((limit - start)) -ge $seconds ] || { echo "== $name: left out, may need $seconds s of $((limit - start))"; return; }
    timeout -s INT -k 10 $((seconds * slow)) "$@" > $OUT/../line.log 2>&1; code=$?
    { echo "##### $name"; cat $OUT/../line.log; } >> $log
    echo "== $start to $(($(date +%s) - began)) s: $name, exit code $code"
    grep "^SET\|^iter 12\|passed\|failed\|skipped\|tokens/s" $OUT/../line.log | cut -c1-250
}
version() { # NAME FLAGS: steps of a version in .gpu/versions, and their kernels
    cat $place/versions/$1/VERSION && cd $place/versions/$1 && REPO=. python3 $sweep "{\"ngram\":0,\"prof\":1$2$tiny}"
}
sizes() { # PRESET...: of the working tree, 4 steps and 4 that are timed
    for size in "$@"; do REPO=. python3 $sweep "{\"preset\":\"$size\",\"batch_tokens\":131072,\"n\":4,\"prof\":1$tiny}"; done
}
tiles() { PYTHONPATH=$place/versions/mlp python3 records/bench/2026-11-28_step/codegen/mlp_tiles.py; }
autotune() { ENABLE_PERSISTENT_TMA_MATMUL=1 version all ',"compile":"max-autotune-no-cudagraphs"'; }
nanogpt() {
    for part in train val; do tail -qc +1025 $DATA/*${part}*.bin > $place/nanoGPT/data/mine/$part.bin; done
    cd $place/nanoGPT && python3 train.py --dataset=mine $nano --max_iters=12 --eval_interval=1000 --eval_iters=1 \
        --always_save_checkpoint=False --out_dir=$OUT/../ng --log_interval=1
}
# A process may take a fifth of the memory, and four run at once
tests() { PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.2 python3 -m pytest -m gpu -n 4 -q -p no:cacheprovider; }
sample() {
    local run; run=$(mktemp -d)
    python3 train_gpt.py $flags --data $DATA --max_steps 2 --eval_every end --eval_tokens 4096 --out_dir $run/run
    for options in "" "--compile"; do
        python3 sample.py --run $run/run --device $device --prompt "def" --max_new_tokens ${NEW:-512} $options
    done
}
export -f version sizes tiles autotune nanogpt tests sample
export place sweep tiny flags nano device root

{
nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv
python3 -c "import torch,platform; print(platform.python_version(), torch.__version__, torch.version.cuda, torch.backends.cudnn.version())"
lscpu | grep "Model name"; nproc; cat $place/versions/*/VERSION
} > $OUT/machine.log 2>&1

# Name, the seconds that it may take, log. First alone, one after the other
line nanogpt 80 nanogpt.log bash -c nanogpt
line base 80 sweep.log bash -c "version base"
names=$(grep -v "^#" records/bench/2026-11-28_step/versions.txt | cut -d" " -f1)
for name in $(sed "1d; /^all/,\$d" <<< "$names"); do
    line $name 65 sweep.log bash -c "version $name"
done
line all 65 sweep.log bash -c "version all"
line base-fp8 60 sweep.log bash -c "version base ',\"fp8\":true'"
line ngram 65 sweep.log bash -c "version all ',\"ngram\":2'"  # the preset; a later key wins
line all-fp8 60 sweep.log bash -c "version all ',\"fp8\":true'"
for name in $(sed "1,/^all/d" <<< "$names"); do  # those of fp8* with --fp8
    case $name in fp8*) more=',"fp8":true' ;; *) more= ;; esac
    line $name 65 sweep.log bash -c "version $name '$more'"
done
line tiles 90 tiles.log bash -c tiles
line large 90 sweep.log bash -c "sizes gpt2-large"
line xl 120 sweep.log bash -c "sizes gpt2-xl"
line autotune 240 sweep.log bash -c autotune
line tests 240 tests.log bash -c tests
line sample 100 sample.log bash -c sample
