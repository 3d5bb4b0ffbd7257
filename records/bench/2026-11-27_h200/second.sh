# As it was run (206 s were too few for its last line)
export PYTHONUNBUFFERED=1 TIKTOKEN_CACHE_DIR=$PWD/.gpu/tiktoken PYTHONWARNINGS=ignore
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
began=$(date +%s)
mark() { echo "== $(($(date +%s) - began)) s: $*"; }
export OUT=${OUT:-/tmp/out}
: "${BATCH:=131072}" "${PRESET:=gpt2-small}" "${MB:=16}" "${SMALL:=networkx}"
SP=$(python3 -c "import numpy, pathlib; print(pathlib.Path(numpy.__file__).parents[1])")
python3 data/prepare.py files $SP/{transformers,numpy,networkx} --include "*.py" --tokenizer gpt2 --out data/mine > $OUT/machine.log 2>&1 &
python3 data/prepare.py files $SP/$SMALL --include "*.py" --tokenizer gpt2 --out data/nx > $OUT/nx.log 2>&1; wait
cat $OUT/nx.log >> $OUT/machine.log; rm $OUT/nx.log; cat .gpu/commit >> $OUT/machine.log; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >> $OUT/machine.log
mkdir -p /tmp/nodecay; cp -r *.py data runtime ops inference benchmarks common records /tmp/nodecay/ 2>/dev/null; cp *.txt *.toml *.md /tmp/nodecay/ 2>/dev/null
sed -i 's/, decay=1.5)/)/' /tmp/nodecay/model.py
mark data; grep tokens $OUT/machine.log
quality() { # NAME FOLDER FLAGS
    local name=$1 folder=$2 here=$PWD; shift 2
    (cd $folder && OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=4 timeout 150 python3 train_gpt.py --preset $PRESET --vocab_size 50304 --compile --micro_batch $MB --batch_tokens $BATCH --eval_every 0 --out_dir /tmp/q/$name "$@" > $OUT/q-$name.log 2>&1)
    echo "$name $(grep -o 'val_[a-z]* [0-9.]*' $OUT/q-$name.log | tail -2 | tr '\n' ' ')" >> $OUT/quality.log
    rm -f /tmp/q/$name/*.pt
}
mkdir -p /tmp/q
here=$PWD
quality ngram-nodecay-0 /tmp/nodecay --seed 0 --data $here/data/mine --max_steps ${STEPS:-120} --eval_tokens ${EV:-1048576} --ngram 2 --ngram_rows ${ROWS:-251520} &
quality nx-base-0 . --seed 0 --data $here/data/nx --max_steps ${NXSTEPS:-96} --eval_tokens ${NXEV:-262144} &
quality nx-nodecay-0 /tmp/nodecay --seed 0 --data $here/data/nx --max_steps ${NXSTEPS:-96} --eval_tokens ${NXEV:-262144} &
(TORCHINDUCTOR_COMPILE_THREADS=2 timeout 100 python3 .gpu/small_card.py 24 --preset gpt2-medium --vocab_size 50304 --data data/mine --compile --eval_tokens 16384 --batch_tokens 65536 --max_steps 3 --eval_every 0 --out_dir /tmp/s/medium > $OUT/small_card.log 2>&1; rm -rf /tmp/s; grep "batch:\|^step\|peak" $OUT/small_card.log) &
(TORCHINDUCTOR_COMPILE_THREADS=2 timeout 110 python3 train_gpt.py --preset laptop --vocab_size 50304 --data data/mine --compile max-autotune-no-cudagraphs --max_steps 20 --eval_every 0 --eval_tokens 16384 --out_dir /tmp/s2 > $OUT/autotune.log 2>&1; echo "autotune rc $?"; tail -3 $OUT/autotune.log | cut -c1-150) &
wait
cat $OUT/quality.log; mark together
left=$((${LIMIT:-195} - $(date +%s) + began))
DATA=data/mine REPO=. timeout $((left - 4)) python3 .gpu/sweep.py '{"ngram":2,"ngram_rows":251520,"n":5}' > $OUT/sweep.log 2>&1
grep SET $OUT/sweep.log; mark sweep
