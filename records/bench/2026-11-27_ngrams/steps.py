import sys, time, statistics, dataclasses
sys.path.insert(0,'.')
from runtime import set_environment
set_environment()
import torch, model
import train_gpt as T
from runtime.device import init_device_and_ranks
from runtime.dataset import open_stream
threads=int(sys.argv[1]); n=int(sys.argv[2])
cfg=T.make_config(data='data/python', dtype="bf16")
ctx=init_device_and_ranks(cfg)
torch.set_num_threads(threads)
stream=open_stream(cfg,ctx)
cfg=T.resolve_auto(cfg,ctx,stream,{})
stream.seqs_per_batch=cfg.batch_tokens//cfg.seq_len
table=list(model.PARAM_TABLE)
old=[model.ParamSpec(r"ngrams\.weight", init=model.zeros, lr_mul=12.0, decay=1.0)]+[r for r in table if 'ngrams' not in r.pattern]
states={}
for name,t,rows in (("old",old,131072),("131k",table,131072),("262k",table,262144),("524k",table,524288)):
    model.PARAM_TABLE[:]=t
    states[name]=T.build(dataclasses.replace(cfg, ngram_rows=rows),ctx,stream.meta["vocab_size"])
    print(name, states[name].raw_model.ngrams.sparse)
times={(m,p):[] for m in states for p in (0.1,0.9)}
for i in range(n):
    for p in (0.1,0.9):
        for m,s in states.items():
            b=T.get_batch(stream,ctx,i)
            t=time.perf_counter(); T.train_step(s,b,p); 
            if i>1: times[m,p].append(time.perf_counter()-t)
for p in (.1,.9):
  for m in states: v=times[m,p]; r=[a/b for a,b in zip(v,times["old",p])]; print(threads,p,m, round(statistics.median(v)*1e3,1), round(min(v)*1e3,1), 'ratio', round(statistics.median(r),3))
