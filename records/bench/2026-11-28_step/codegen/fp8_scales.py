"""python fp8_scales.py MODE SEED [hist]: 4 layers x 256 for 120 steps of 512 tokens on data/python with emulated fp8 in MLP and head.
MODE: none (fp32), row, static, or mixed (static for x and w, rows for gradients). Run in the repository."""
import sys, json, os
sys.path.insert(0, os.getcwd())
from runtime import set_environment
set_environment()
import torch
import train_gpt as t, ops.linear, model as M
torch.set_num_threads(1)
mode, seed, hist = sys.argv[1], int(sys.argv[2]), "hist" in sys.argv
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
TOKENS, STEPS = 512, 120
def row(x, d):
    s = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(d).max
    return (x / s).to(d).float() * s
def static(x, d, s):
    m = torch.finfo(d).max
    return (x * s).clamp(-m, m).to(d).float() / s
LOW = {E4: 2.0**-10, E5: 2.0**-17}   # below half of the smallest subnormal: zero
SUB = {E4: 2.0**-6, E5: 2.0**-14}    # below the smallest normal number
records, step = {}, [0]
def note(kind, x, d, s):
    if not hist or step[0] not in (1, 2, 10, 60, 120): return
    a = x.detach().abs().flatten(0, -2)
    nz = a > 0
    n = max(1, int(nz.sum()))
    total = a.square().sum().item() or 1.0
    rs = torch.finfo(d).max / a.amax(-1, keepdim=True).clamp(min=1e-30)
    out = {}
    for name, v in (("static", a * s), ("row", a * rs)):
        low = nz & (v < LOW[d]); sub = nz & (v < SUB[d]); high = v > torch.finfo(d).max
        out[name] = dict(zero=int(low.sum()) / n, subnormal=int(sub.sum()) / n, over=int(high.sum()) / n, lost_energy=a[low].square().sum().item() / total)
    q = lambda y: (y - x.flatten(0, -2)).norm().item() / total**0.5
    out["error"] = dict(static=q(static(x.detach().flatten(0, -2), d, s)), row=q(row(x.detach().flatten(0, -2), d)))
    e = (a[nz] * s).log2().floor()
    out["log2 of value times static scale: min, 0.1%, 1%, 50%, 99%, 99.9%, max"] = [e.min().item(), *torch.quantile(e[torch.randperm(len(e))[:100000]], torch.tensor([.001, .01, .5, .99, .999])).tolist(), e.max().item()] if n > 1 else []
    records.setdefault(step[0], {}).setdefault(kind, []).append(out)
class Emu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, kind, gs):
        ctx.save_for_backward(x, w); ctx.kind, ctx.gs = kind, gs
        note(kind + ".x", x, E4, 1.0); note(kind + ".w", w, E4, 64.0)
        if mode == "none": return x @ w.T
        if mode == "row": return row(x, E4) @ row(w, E4).T
        return static(x, E4, 1.0) @ static(w, E4, 64.0).T
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors; gs = ctx.gs
        note(ctx.kind + ".grad", g, E5, gs)
        if mode == "none": dx = g @ w
        elif mode == "row": dx = row(g, E5) @ row(w.T.contiguous(), E4).T
        elif mode == "static": dx = static(g, E5, gs) @ static(w, E4, 64.0)
        else: dx = row(g, E5) @ static(w, E4, 64.0)
        return dx, g.flatten(0, -2).T @ x.flatten(0, -2), None, None
plain_wrap = t.wrap_model
def wrap(m, *args):
    for b in m.blocks:
        b.mlp.fc.matmul = lambda x, w: Emu.apply(x, w, "fc", 128.0 * TOKENS)
        b.mlp.proj.matmul = lambda x, w: Emu.apply(x, w, "proj", 128.0 * TOKENS)
    m.head.matmul = lambda x, w: Emu.apply(x, w, "head", 2.0**15)
    return plain_wrap(m, *args)
t.wrap_model = wrap
plain_step = t.train_step
def train_step(*a):
    step[0] += 1
    return plain_step(*a)
t.train_step = train_step
cfg = t.make_config(device="cpu", dtype="fp32", data="/work/main/data/python", n_layer=4, n_head=2, n_embd=256, seq_len=128, window="L", ngram=0, batch_tokens=TOKENS,
    max_steps=STEPS, short_frac=0.0, eval_tokens=16384, eval_every=0, loss_chunk=2048, seed=seed, out_dir=f"/tmp/fp8exp/{mode}-{seed}", attn="sdpa", micro_batch=4, save_every=10**6)
out = t.train(cfg)
rows = [json.loads(l) for l in open(f"/tmp/fp8exp/{mode}-{seed}/metrics.jsonl")]
train = [r["train_loss"] for r in rows if "train_loss" in r]
print("RESULT", mode, seed, "val_loss", [r["val_loss"] for r in rows if "val_loss" in r], "train", train[-3:], flush=True)
for s, kinds in records.items():
    for kind, values in sorted(kinds.items()):
        print("HIST step", s, kind, json.dumps(values[0] if "head" in kind else [values[0], values[-1]]), flush=True)
