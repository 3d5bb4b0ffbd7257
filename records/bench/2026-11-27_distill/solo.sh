# solo.sh NEW_REPO OUT.tsv TEXT:MINUTES...: two at once, one core each
export PATH=/tmp/venv/bin:$PATH
new=$1 out=$2; shift 2; L=("$@")
worker() { for ((i=$1;i<${#L[@]};i+=2)); do job=${L[$i]}; text=${job%:*} min=${job#*:}; dir=/tmp/w/texts/runs/d-$text-$min; rm -rf $dir
 (cd $new; OMP_NUM_THREADS=1 taskset -c $1 python train_gpt.py --data /tmp/w/texts/new/$text --minutes $min --eval_every 0 --eval_tokens 0 --out_dir $dir > $dir.txt 2>&1)
 python -c "
import json
s=json.load(open('$dir/summary.json')); d=open('$dir.txt').read()
print('$text','$min',f\"{s['val_bpb']:.4f}\",f\"{s['train_time_s']:.1f}\",s['step'],s['stopped_by'],'distill' if 'for a teacher' in d else '',sep='\t')" >> $out 2>&1 || echo "$job FAILED" >> $out; done; }
worker 0 & worker 1 & wait
