# pair.sh OUT MINUTES TEXT...: both commits at once, one core each; they swap cores after each text
# base: a checkout of 6345c03, new: one of the other commit; texts/SIDE/TEXT: by each side's prepare.py
out=$1 minutes=$2 core=0
shift 2
for text in "$@"; do
    for side in base new; do
        dir=$PWD/runs/$text-$minutes-$side
        (cd $side; OMP_NUM_THREADS=1 taskset -c $core python train_gpt.py --data ../texts/$side/$text --minutes $minutes \
            --eval_every 0 --eval_tokens 0 --out_dir $dir; echo $text $minutes $side $dir/summary.json >> $out) &
        core=$((1 - core))
    done
    wait
    core=$((1 - core))
done
