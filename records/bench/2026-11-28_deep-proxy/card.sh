# On a card, nothing else running: 3 minutes a trainer, on the same tokens once, and their losses on the same split.
#     bash records/bench/2026-11-28_deep-proxy/card.sh [LINE...]
# LINE: data, now, track3, base, nanogpt, now-131k, now-ngram0, nanogpt-fast, by name; without any, all, in order, as far as
# LIMIT seconds suffice. .gpu is what ../2026-11-28_step/pack.sh makes, and in it records/track_3_optimization/train_gpt_simple.py
# of KellerJordan/modded-nanogpt f411b3d. nanoGPT draws its sequences at random, those of validation too. DRY=1: on a CPU
cd "$(dirname "$0")/../../.."
export OUT=$(realpath -m "${OUT:-/tmp/out}") PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore TORCHINDUCTOR_CACHE_DIR=${CACHE:-/tmp/inductor}
place=$(realpath "${PLACE:-.gpu}") root=$PWD lines=" $* " limit=${LIMIT:-570} data=$(realpath -m "${DATA:-/tmp/big}")
export TIKTOKEN_CACHE_DIR=$place/tiktoken
mkdir -p $OUT
began=$(date +%s)

# 180 steps of 524,288 tokens are 94M, 0.93 of the text of the packages that the H100's machine had
steps=${STEPS:-180} packages=${PACKAGES:-transformers numpy networkx torch jax scipy sklearn sympy numba matplotlib onnx botorch pandas}
flags="--preset gpt2-small --compile" batch=524288 peer="--device cuda --compile --batch_tokens $batch"
nano="--batch_size=32 --gradient_accumulation_steps=16" small=131072
if [ "$DRY" ]; then
    shape="--n_layer 2 --n_embd 32 --seq_len 64" batch=512 small=256
    flags="--preset gpt2-small --device cpu --n_head 2 $shape --batch_tokens $batch"
    peer="$shape --head_dim 16 --batch_tokens $batch --micro_tokens 256"
    nano="--device=cpu --compile=False --dtype=float32 --n_layer=2 --n_head=2 --n_embd=32 --block_size=64 --batch_size=8 --gradient_accumulation_steps=1"
fi

line() { # NAME SECONDS COMMAND...: if it was asked for, and so much time is left
    local name=$1 seconds=$2 start=$(($(date +%s) - began)) code; shift 2
    [ "$lines" = "  " ] || [[ $lines == *" $name "* ]] || return
    [ $((limit - start)) -ge $seconds ] || { echo "== $name: left out, may need $seconds s of $((limit - start))"; return; }
    timeout -s INT -k 10 $seconds "$@" > $OUT/$name.log 2>&1; code=$?
    echo "== $start to $(($(date +%s) - began)) s: $name, exit code $code: $(grep -aoE "val[_ ]loss[: ][0-9.]+( | .*)?(train_time.*)?" $OUT/$name.log | tail -1)"
}
prepare() {
    local site found; site=$(python3 -c "import numpy, pathlib; print(pathlib.Path(numpy.__file__).parents[1])")
    for name in $packages; do [ -d $site/$name ] && found="$found $site/$name"; done
    python3 data/prepare.py files $found --include "*.py" --tokenizer gpt2 --val_fraction 0.012 --out $data
}
ours() { # FOLDER FLAGS...
    local folder=$1; shift
    cd $folder && python3 train_gpt.py $flags --data $data --vocab_size 50304 --max_steps $steps --eval_every 0 --eval_tokens 0 \
        --out_dir $(mktemp -d)/run "$@"
}
nanogpt() { # LEARNING RATE, LAST RATE
    mkdir -p $place/nanoGPT/data/big
    for part in train val; do tail -qc +1025 $data/*${part}*.bin > $place/nanoGPT/data/big/$part.bin; done
    cd $place/nanoGPT && python3 train.py --dataset=big $nano --max_iters=$steps --lr_decay_iters=$steps --warmup_iters=$((steps / 10)) \
        --learning_rate=$1 --min_lr=$2 --eval_interval=$steps --eval_iters=32 --always_save_checkpoint=False --out_dir=$(mktemp -d)
}
track3() {
    cd $place && python3 $root/records/bench/2026-11-28_deep-proxy/track3.py --peer train_gpt_simple.py --data $data --vocab_size 50304 --steps $steps $peer --out $OUT/track3-whole.log
}
export -f prepare ours nanogpt track3
export place root data steps packages flags batch small peer nano

{
nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv
python3 -c "import torch,platform; print(platform.python_version(), torch.__version__, torch.version.cuda, torch.backends.cudnn.version())"
lscpu | grep "Model name"; nproc; git rev-parse --short HEAD
} > $OUT/machine.log 2>&1

line data 90 bash -c prepare
[ -f $data/meta.json ] || exit 1
line now 220 bash -c "ours $root"
line track3 240 bash -c track3
line base 230 bash -c "ours $place/versions/base"
line nanogpt 250 bash -c "nanogpt 1e-3 1e-4"
line now-131k 230 bash -c "ours $root --batch_tokens $small --max_steps $((steps * batch / small))"
line now-ngram0 220 bash -c "ours $root --ngram 0"
line nanogpt-fast 250 bash -c "nanogpt 2e-3 2e-4"
ls $OUT
