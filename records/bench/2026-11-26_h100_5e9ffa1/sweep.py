"""Times training steps of several flag sets in one process: python sweep.py '{"micro_batch":64,"prof":1}' ...

As it was run, but for the first lines: it takes commit 6345c03 (REPO=FOLDER) and later ones.
"""
import gc, json, os, sys, time
sys.path.insert(0, os.environ.get("REPO", "."))
from runtime import set_environment
set_environment()
import torch
import train_gpt as t
from benchmarks import harness
try:
    build_state, timed = harness.build_state, harness.timed
except AttributeError:  # after 6345c03: a Config, and ms instead of s
    build_state = lambda flags: harness.build_state(t.make_config(**flags))
    timed = lambda *args: (harness.time_ms(*args)[0] / 1e3,)
cuda = torch.cuda.is_available()

def peaks():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16); b = torch.randn_like(a)
    def med(f, n=12):
        for _ in range(3): f()
        torch.cuda.synchronize(); e = []
        for _ in range(n):
            s, d = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            s.record(); f(); d.record(); torch.cuda.synchronize(); e.append(s.elapsed_time(d))
        return sorted(e)[n // 2]
    ms = med(lambda: a @ b); print(f"peak matmul 8192: {2*8192**3/ms/1e9:.0f} TFLOP/s")
    x = torch.empty(2**30, device="cuda", dtype=torch.uint8); y = torch.empty_like(x)
    ms = med(lambda: y.copy_(x)); print(f"peak copy: {2*2**30/ms/1e6:.0f} GB/s")
    del x, y, a, b
    M = 65536
    for name, (k, n) in {"qk/v/proj 768x768": (768, 768), "qkv 768x2304": (768, 2304), "fc 768x3072": (768, 3072), "proj 3072x768": (3072, 768), "head 768x50304 (M=16384)": (768, 50304)}.items():
        m = 16384 if n > 50000 else M
        X, W, G = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.randn(n, k, device="cuda", dtype=torch.bfloat16), torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        f, dx, dw = med(lambda: X @ W.T), med(lambda: G @ W), med(lambda: G.T @ X)
        fl = 2 * m * k * n / 1e9
        print(f"  gemm {name}: fwd {fl/f:.0f} dx {fl/dx:.0f} dw {fl/dw:.0f} TFLOP/s ({f:.3f} {dx:.3f} {dw:.3f} ms)")
    q = torch.randn(64, 6, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(b):
            f = med(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
            o = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True); g = torch.randn_like(o)
            d = med(lambda: torch.autograd.grad(o, q, g, retain_graph=True))
            fl = 2 * 2 * 64 * 6 * 1024 * 1024 * 128 / 2 / 1e9
            print(f"  attention {b.name}: fwd {f:.3f} ms {fl/f:.0f} TFLOP/s, bwd {d:.3f} ms {2.5*fl/d:.0f}")
    torch.cuda.empty_cache()

if cuda and os.environ.get("PEAKS"): peaks()
for text in sys.argv[1:]:
    flags = json.loads(text); prof, n = flags.pop("prof", 0), flags.pop("n", 6); state = None
    gc.collect()
    if cuda: torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    try:
        began = time.perf_counter()
        state, stream, batch = build_state({"preset": "gpt2-small", "compile": "default", "data": os.environ.get("DATA", ""), **flags})
        built = time.perf_counter() - began
        losses = [round(t.train_step(state, batch, 0.0)[0].item(), 4) for _ in range(4)]
        ready = time.perf_counter() - began
        took = sorted(timed(state.dist_ctx.device, lambda: t.train_step(state, batch, 0.0))[0] for _ in range(n))
        rate = state.cfg.batch_tokens / took[len(took) // 2]
        share = rate * state.raw_model.flops_per_token() / 989e12
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0
        print("SET", text, f"{1e3*took[len(took)//2]:.1f} ms ({1e3*took[0]:.1f}-{1e3*took[-1]:.1f}) {rate:,.0f} tok/s MFU {share:.1%} mb {state.micro_batch} chunk {state.cfg.loss_chunk} attn {state.cfg.attn} ckpt {state.cfg.checkpointing} peak {peak:.1f} GiB built {built:.0f} s ready {ready:.0f} s", losses, flush=True)
        if prof and cuda:
            from torch.profiler import profile, ProfilerActivity
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
                t.train_step(state, batch, 0.0); torch.cuda.synchronize()
            rows = [e for e in p.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
            total = sum(e.self_device_time_total for e in rows)
            print(f"  kernels in all {total/1e3:.1f} ms")
            for e in sorted(rows, key=lambda e: -e.self_device_time_total)[:60]:
                print(f"  {e.self_device_time_total/1e3:8.2f} ms {e.count:6d} x {e.key[:150]}")
    except Exception as error:
        import traceback
        print("SET", text, "FAILED", type(error).__name__, str(error)[:400], flush=True); traceback.print_exc(limit=-6)
