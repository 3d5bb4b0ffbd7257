"""drive.py JOBS.json OUT.jsonl SECONDS WORKERS DEVICE: small runs, several at once."""
import json, multiprocessing as mp, os, sys, time, contextlib, io, tempfile
def worker(q, lock, out, deadline, device, i):
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/repo")
    with contextlib.redirect_stdout(io.StringIO()):
        from runtime import set_environment
        set_environment()
    import torch
    torch.set_num_threads(1)
    import train_gpt as t
    from opts import OPTS
    t.sample_text = lambda *a, **k: ""
    t.save_checkpoint = lambda *a, **k: None
    t.save_best_weights = lambda *a, **k: None
    tmp = tempfile.mkdtemp()
    n = 0
    while time.time() < deadline:
        try: job = q.get(timeout=1)
        except Exception: break
        OPTS.clear(); OPTS.update(job.get("opts", {}))
        f = dict(device=device, dtype="fp32", attn="sdpa" if device == "cuda" else "auto", eval_every=0, eval_tokens=0, loss_chunk=8192, log_every=10**6, preset="laptop",
                 n_layer=2, n_embd=128, n_head=1, batch_tokens=4096, weight_decay=0.05, max_steps=400) | job["flags"]
        f["micro_batch"] = max(1, f["batch_tokens"] // f.get("seq_len", 2048))
        began = time.time()
        n += 1
        state_box = []
        def on_step(state, loss):
            if time.time() > deadline: raise RuntimeError("deadline")
            d = OPTS.get("ema")
            if d:
                with torch.no_grad():
                    w = state.extra.setdefault("eval_weights", {k: p.detach().clone() for k, p in state.raw_model.named_parameters()})
                    ps = dict(state.raw_model.named_parameters())
                    torch._foreach_lerp_(list(w.values()), [ps[k] for k in w], 1 - d)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                s = t.train(t.make_config(out_dir=f"{tmp}/{n}", data=f"{os.environ['TEXTS']}/{job['data']}", **f), on_step=on_step)
            r = dict(bpb=round(s["val_bpb"], 5), loss=s["val_loss"], s=round(time.time() - began, 1))
        except Exception as e:
            if "deadline" in str(e): break
            r = dict(error=f"{type(e).__name__}: {e}"[:300])
        with lock, open(out, "a") as file:
            file.write(json.dumps(job | r) + "\n")
if __name__ == "__main__":
    jobs, out, seconds, n, device = sys.argv[1:]
    deadline = time.time() + float(seconds)
    c = mp.get_context("spawn"); q = c.Queue(); lock = c.Lock()
    for j in json.load(open(jobs)): q.put(j)
    ps = [c.Process(target=worker, args=(q, lock, out, deadline, device, i), daemon=True) for i in range(int(n))]
    for p in ps: p.start(); 
    for p in ps: p.join(max(1, deadline + 5 - time.time()))
    os._exit(0)
