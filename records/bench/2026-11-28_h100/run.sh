# As it was run on the card. Beside it lay nanoGPT, sweep.py, the tokenizer, and the edit NorMuon of docs/edits.md
export PYTHONUNBUFFERED=1 TIKTOKEN_CACHE_DIR=$PWD/.gpu/tiktoken PYTHONWARNINGS=ignore
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor OUT=${OUT:-/tmp/out}
: "${STEPS:=120}" "${LONG:=360}" "${BATCH:=131072}" "${PRESET:=gpt2-small}" "${MB:=32}" "${EV:=1048576}"
: "${SET1:=transformers numpy networkx}" "${SET2:=transformers numpy networkx torch jax scipy sklearn sympy numba matplotlib onnx botorch pandas}"
began=$(date +%s)
mark() { echo "== $(($(date +%s) - began)) s: $*"; }
{
nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv
python3 -c "import torch,platform; print(platform.python_version(), torch.__version__, torch.version.cuda, torch.backends.cudnn.version())"
lscpu | grep "Model name"; nproc; cat .gpu/commit
} > $OUT/machine.log 2>&1
SP=$(python3 -c "import numpy, pathlib; print(pathlib.Path(numpy.__file__).parents[1])")
prepare() { # FOLDER PACKAGES
    local out=$1 found=; shift
    for name in "$@"; do [ -d $SP/$name ] && found="$found $SP/$name"; done
    python3 data/prepare.py files $found --include "*.py" --tokenizer gpt2 --out $out
}
prepare data/mine $SET1 > $OUT/mine.log 2>&1 & prepare data/big $SET2 > $OUT/big.log 2>&1 & wait
cat $OUT/mine.log $OUT/big.log >> $OUT/machine.log; rm $OUT/mine.log $OUT/big.log
grep "tokens (" $OUT/machine.log; mark data
mkdir -p .gpu/nanoGPT/data/mine
for s in train val; do tail -c +1025 data/mine/*${s}*.bin > .gpu/nanoGPT/data/mine/$s.bin; done

# One after the other
for flags in "--compile" ""; do
    timeout 70 python3 train_gpt.py --eval_every 0 --eval_tokens 0 $flags --out_dir /tmp/d$flags > /tmp/d.log 2>&1
    echo "##### python train_gpt.py --eval_every 0 --eval_tokens 0 $flags" >> $OUT/default.log; cat /tmp/d.log >> $OUT/default.log; tail -2 /tmp/d.log | cut -c1-200
    rm -rf /tmp/d$flags; mark default $flags
done
DATA=data/mine REPO=. timeout 150 python3 .gpu/sweep.py "{\"preset\":\"$PRESET\",\"prof\":1}" "{\"preset\":\"$PRESET\",\"ngram\":2,\"ngram_rows\":251520,\"prof\":1}" > $OUT/sweep.log 2>&1
grep SET $OUT/sweep.log; mark sweep
(cd .gpu/nanoGPT && timeout 80 python3 train.py --dataset=mine --batch_size=32 --gradient_accumulation_steps=16 --max_iters=12 --eval_interval=1000 --eval_iters=1 --always_save_checkpoint=False --out_dir=/tmp/ng --log_interval=1 $NANO) > $OUT/nanogpt.log 2>&1
tail -2 $OUT/nanogpt.log; mark nanoGPT

# At once. Edits are copies of this folder
for edit in adam normuon; do mkdir -p /tmp/$edit; cp -r *.py data runtime ops inference benchmarks common records *.txt *.toml *.md /tmp/$edit/ 2>/dev/null; done
sed -i 's/optim="rmsprop", lr_mul=17.0, betas=(0.0, 0.9)/lr_mul=12.0/' /tmp/adam/model.py; diff model.py /tmp/adam/model.py >> $OUT/machine.log
(cd /tmp/normuon && patch -p1 < $OLDPWD/.gpu/normuon.patch >> $OUT/machine.log 2>&1)
quality() { # NAME FOLDER FLAGS
    local name=$1 folder=$2; shift 2
    (cd $folder && OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=4 timeout ${QT:-380} python3 train_gpt.py --preset $PRESET --vocab_size 50304 --compile --micro_batch $MB --batch_tokens $BATCH --eval_every 0 --eval_tokens $EV --out_dir /tmp/q/$name "$@" > /tmp/q-$name.log 2>&1)
    echo "$name $(grep -o 'val_[a-z]* [0-9.]*' /tmp/q-$name.log | tail -2 | tr '\n' ' ')" >> $OUT/quality.log
    rm -f /tmp/q/$name/*.pt
}
mkdir -p /tmp/q
two="--ngram 2 --ngram_rows 251520" mine="--data $PWD/data/mine --max_steps $STEPS" big="--data $PWD/data/big --max_steps $LONG"
quality big-ngram . $big $two &
quality big . $big &
sleep ${NAP:-20}
quality ngram . $mine $two &
quality ngram-adam /tmp/adam $mine $two &
quality normuon /tmp/normuon $mine &
OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=2 timeout 300 python3 -m pytest -m gpu -n 6 -q -p no:cacheprovider > $OUT/tests.log 2>&1 &
wait
tail -12 $OUT/tests.log; cat $OUT/quality.log; for f in /tmp/q-*.log; do echo "##### $f"; cat $f; done > $OUT/quality-logs.log; mark together
