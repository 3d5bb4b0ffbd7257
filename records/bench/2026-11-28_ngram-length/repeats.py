import sys, numpy as np, glob, time
M=int(sys.argv[1])
for d in sys.argv[2:]:
    tr = np.concatenate([np.fromfile(f, dtype='<u2', offset=1024) for f in sorted(glob.glob(d+'/*train*.bin'))])[:M].astype(np.uint64)
    row=[]; t=time.time()
    for k in (3,4,5,6):
        x=tr; o = np.zeros(len(x)-k+1, np.uint64)
        for i in range(k): o = o*np.uint64(6364136223846793005)+x[i:len(x)-k+1+i]+np.uint64(1)
        u,c = np.unique(o, return_counts=True)
        row.append(f"{k}: {1-len(u)/len(o):.3f} {c[c>1].sum()/len(o):.3f}")
    print(f"{d.split('/')[-1]:10s}", len(tr), *row, f"{time.time()-t:.1f}s", sep='  ')
