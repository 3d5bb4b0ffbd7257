# tried.sh "NAME|SETTINGS|DATA|FLAGS"...: runs of tried.diff on c7ae4aa, two at once, one core each
L=("$@")
worker() { for ((i=$1;i<${#L[@]};i+=2)); do IFS='|' read -r name settings data flags <<< "${L[$i]}"
  env $settings OMP_NUM_THREADS=1 taskset -c $1 python train_gpt.py --data $data --n_layer 2 --n_head 1 --n_embd 128 \
    --batch_tokens 2048 --minutes 20 $flags --eval_every 0 --eval_tokens 0 --out_dir $name
done; }
worker 0 & worker 1 & wait
