"""Cases of test_benchmarks.py, some of which go wrong.

They run in processes of their own, which import nothing else for them.
"""

import os
import signal
import time


def counting_case(start: int):
    yield dict(started=time.monotonic())
    while True:
        start += 1
        yield dict(ms=start, time=time.monotonic())


def killed_case():
    yield dict(ready=True)
    os.kill(os.getpid(), signal.SIGKILL)


def broken_case():
    yield dict(ready=True)
    yield dict(number=1 / 0)


def full_case():
    yield dict(ready=True)
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")


def step_case(cfg, n_cases):
    """A step takes 20 ms with the naive attention, else 10, longer if compiled; fp8 fails."""
    if cfg.fp8:
        raise RuntimeError("no such kernel")
    ms = 20.0 if cfg.attn == "math" else 10.0
    if cfg.compile != "off":
        ms *= 1.5
    flags = [cfg.dtype, cfg.attn, cfg.compile, cfg.fp8, cfg.checkpointing]
    yield dict(micro_batch=cfg.micro_batch or 1, flags=flags)
    while True:
        yield {"ms/step": ms, "tokens/s": 512000 / ms}


# A train_gpt.py of another checkout: its loss falls in a line from 5 to 5 - fall, in --max_steps
# steps and one second, where --softcap is the fall, larger by a tenth with each seed. It notes the
# order of runs in the folder above; --adam_lr 9 fails.
FAKE_TRAINER = r"""
import json, sys
from pathlib import Path

flags = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
with open(Path(__file__).parents[1] / "order.txt", "a") as file:
    data = Path(flags["data"]).name
    print(flags["seed"], data, flags["softcap"], flags.get("dtype", ""), file=file)
if flags.get("adam_lr") == "9":
    print("a warning\nerror: it diverged", file=sys.stderr)
    sys.exit(1)
steps, every, folder = int(flags["max_steps"]), int(flags["eval_every"]), Path(flags["out_dir"])
fall = float(flags["softcap"]) * (1 + int(flags["seed"]) / 10 * (flags["softcap"] != "1"))
rows = [dict(step=1, train_loss=5.0)]
for i in range(every, steps + 1, every):
    rows.append(dict(step=i, train_time_s=i / steps, val_loss=5 - fall * i / steps))
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
(folder / "summary.json").write_text(json.dumps(rows[-1] | dict(dtype="fp32", val_bpb=None)))
"""
