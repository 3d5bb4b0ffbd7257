"""python micro_steps.py REPO N: N times a step of 16,384 tokens, in 1 and in 8 micro-steps."""

import statistics
import sys
import time

import torch

sys.path.insert(0, sys.argv[1])
from runtime.device import init_device_and_ranks
from train_gpt import build, make_config, train_step

sizes = dict(batch_tokens=16384, short_frac=0.0, ngram=4, ngram_dropout=0.0, embed_decay=0.0)
how = dict(dtype="fp32", attn="blocked", loss_chunk=2048, muon_lr=0.01, adam_lr=0.01)
cfg = make_config(**sizes, **how)
state = build(cfg, init_device_and_ranks(cfg), 1024, eot=0)
generator = torch.Generator().manual_seed(0)
batches = [torch.randint(0, 1000, (8, 2049), generator=generator) for _ in range(4)]
times = {8: [], 1: []}
for i in range(int(sys.argv[2])):
    for micro_batch, seconds in times.items():
        state.micro_batch = micro_batch
        start = time.perf_counter()
        train_step(state, batches[i % 4], 0.5)
        seconds.append(time.perf_counter() - start)
for micro_batch, seconds in times.items():
    middle = statistics.median(seconds)
    print(f"micro_batch {micro_batch}: least {min(seconds):.3f} s, median {middle:.3f} s")
