# As it was run on the card (576 s were too few for its last line). Beside it lay nanoGPT, sweep.py, small_card.py,
# the tokenizer, and the edit NorMuon of docs/edits.md as it then was
export PYTHONUNBUFFERED=1 TIKTOKEN_CACHE_DIR=$PWD/.gpu/tiktoken PYTHONWARNINGS=ignore
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
began=$(date +%s)
mark() { echo "== $(($(date +%s) - began)) s: $*"; }
export OUT=${OUT:-/tmp/out}
: "${STEPS:=120}" "${BATCH:=131072}" "${PRESET:=gpt2-small}" "${MB:=16}"
{
nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv
python3 -c "import torch,platform; print(platform.python_version(), torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), torch.cuda.get_device_properties(0))"
lscpu | grep "Model name"; nproc; git log --oneline -1 2>/dev/null; cat .gpu/commit
} > $OUT/machine.log 2>&1
SP=$(python3 -c "import numpy, pathlib; print(pathlib.Path(numpy.__file__).parents[1])")
python3 data/prepare.py files $SP/{transformers,numpy,networkx} --include "*.py" --tokenizer gpt2 --out data/mine >> $OUT/machine.log 2>&1
tail -2 $OUT/machine.log
mark data
mkdir -p .gpu/nanoGPT/data/mine
for s in train val; do tail -c +1025 data/mine/*${s}*.bin > .gpu/nanoGPT/data/mine/$s.bin; done
DATA=data/mine REPO=. PEAKS=1 timeout 170 python3 .gpu/sweep.py '{"prof":1}' '{"fp8":true,"prof":1}' > $OUT/sweep.log 2>&1
grep SET $OUT/sweep.log; mark sweep
(cd .gpu/nanoGPT && timeout 80 python3 train.py --dataset=mine --batch_size=32 --gradient_accumulation_steps=16 --max_iters=12 --eval_interval=1000 --eval_iters=1 --always_save_checkpoint=False --out_dir=/tmp/ng --log_interval=1) > $OUT/nanogpt.log 2>&1
tail -2 $OUT/nanogpt.log; mark nanoGPT

# At once. The two edits are copies of this folder
for edit in nodecay normuon; do mkdir -p /tmp/$edit; cp -r *.py data runtime ops inference benchmarks common records /tmp/$edit/ 2>/dev/null; cp *.txt *.toml *.md /tmp/$edit/ 2>/dev/null; done
sed -i 's/, decay=1.5)/)/' /tmp/nodecay/model.py
(cd /tmp/normuon && patch -p1 < $OLDPWD/.gpu/normuon.patch >> $OUT/machine.log 2>&1)
quality() { # NAME FOLDER FLAGS
    local name=$1 folder=$2 here=$PWD; shift 2
    (cd $folder && OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=4 timeout 330 python3 train_gpt.py --preset $PRESET --vocab_size 50304 --data $here/data/mine --compile --micro_batch $MB --batch_tokens $BATCH --max_steps $STEPS --eval_every 0 --eval_tokens 1048576 --out_dir /tmp/q/$name "$@" > /tmp/q-$name.log 2>&1)
    echo "$name $(grep -o 'val_[a-z]* [0-9.]*' /tmp/q-$name.log | tail -2 | tr '\n' ' ')" >> $OUT/quality.log
    rm -f /tmp/q/$name/*.pt
}
layouts() {
    local small="--preset $PRESET --vocab_size 50304 --data data/mine --eval_tokens 65536 --batch_tokens 65536 --max_steps 6 --eval_every 0"
    for flags in "--parallel fsdp --micro_batch 16" "--parallel fsdp --fp8 --micro_batch 16" "--parallel ddp --micro_batch 16" "--parallel ddp --compile reduce-overhead --micro_batch 16"; do
        echo "##### $flags"
        timeout 100 torchrun --nproc_per_node=1 train_gpt.py $small --compile $flags --out_dir "/tmp/l/${flags// /_}" 2>&1 | grep -v Warn
        rm -rf /tmp/l
    done
    for size in small medium xl; do
        echo "##### 24 GB, gpt2-$size"
        timeout 120 python3 .gpu/small_card.py 24 --preset gpt2-$size --vocab_size 50304 --data data/mine --compile --eval_tokens 16384 --batch_tokens 65536 --max_steps 3 --eval_every 0 --out_dir /tmp/s/$size 2>&1
        rm -rf /tmp/s
    done
}
mkdir -p /tmp/q
quality base-0 . --seed 0 &
quality ngram-0 . --seed 0 --ngram 2 --ngram_rows 251520 &
quality normuon-0 /tmp/normuon --seed 0 &
sleep 25
quality nodecay-0 /tmp/nodecay --seed 0 &
quality base-1 . --seed 1 &
quality nodecay-1 /tmp/nodecay --seed 1 &
layouts > $OUT/layouts.log 2>&1 &
OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=2 timeout 300 python3 -m pytest -m gpu -n 6 -q -p no:cacheprovider > $OUT/tests.log 2>&1 &
wait
tail -12 $OUT/tests.log; cat $OUT/quality.log; grep -h "#####\|tok/s\|batch:\|Error" $OUT/layouts.log | cut -c1-200 | tail -40
cat /tmp/q-*.log > $OUT/quality-logs.log; mark together
left=$((${LIMIT:-570} - $(date +%s) + began))
if [ $left -gt 60 ]; then
DATA=data/mine REPO=. timeout $((left - 10)) python3 .gpu/sweep.py '{"compile":"max-autotune-no-cudagraphs","n":4}' > $OUT/autotune.log 2>&1
grep SET $OUT/autotune.log; mark autotune
fi
