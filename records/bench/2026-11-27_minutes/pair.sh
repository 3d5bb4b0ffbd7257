# pair.sh NEW_REPO OUT.tsv TEXT...:MINUTES : base and new at once, one core each, which they swap
new=$1 out=$2; shift 2
i=0
for job in "$@"; do
  text=${job%:*} min=${job#*:}
  for side in base new; do
    repo=/tmp/w/base; [ $side = new ] && repo=$new
    core=$(( i % 2 )); [ $side = new ] && core=$(( 1 - i % 2 ))
    dir=/tmp/w/texts/runs/$side-$text-$min; rm -rf $dir
    ( cd $repo && OMP_NUM_THREADS=1 taskset -c $core python train_gpt.py --data /tmp/w/texts/$([ $side = new ] && echo new || echo old)/$text --minutes $min --eval_every 0 --eval_tokens 0 --out_dir $dir > $dir.txt 2>&1 ) &
  done; wait
  i=$((i+1))
  python - $text $min <<'P' >> $out
import json,sys
text,m=sys.argv[1:]
row=[text,m]
for side in("base","new"):
    d=f"/tmp/w/texts/runs/{side}-{text}-{m}"
    try:
        s=json.load(open(d+"/summary.json")); 
        row+=[f"{s['val_bpb']:.4f}",f"{s['train_time_s']:.1f}",str(s.get('step',s.get('steps'))),str(s.get('stopped_by'))]
    except Exception as e: row+=["FAILED",repr(e),"",""]
try: row.append(f"{float(row[6])/float(row[2]):.4f}")
except Exception: pass
print(*row,sep="\t",flush=True)
P
done
