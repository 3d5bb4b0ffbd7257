"""`bench.py infer`: prefill and decode, without a KV cache, with one, compiled, in int8."""

from dataclasses import replace
from functools import partial
from statistics import mean

import torch

from benchmarks.harness import Bench, build_state, measure, table, time_ms
from inference.generation import compile_decode_step, freeze, generate
from inference.int8 import quantize
from runtime.device import peak_memory_mb
from train_gpt import Config

MODES = ("no cache", "KV cache", "KV cache, compiled", "KV cache, int8", "KV cache, compiled, int8")


@torch.no_grad()
def infer_case(cfg: Config, batch: int, mode: str, prompt_len: int, n_tokens: int):
    """Yield the seconds of warming up; then the ms to the first of n_tokens and of the others."""
    state, stream, _ = build_state(cfg)
    model = state.raw_model
    device = state.dist_ctx.device
    vocab_size = stream.meta["vocab_size"]
    if "int8" in mode:
        quantize(model)
    freeze(model)  # as sample.py does
    decode_step = compile_decode_step(device) if "compiled" in mode else None
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocab_size, (batch, prompt_len), generator=generator).to(device)

    def times_ms(n: int) -> list[float]:
        tokens = generate(
            model,
            list(prompts),
            n_tokens=n_tokens,
            vocab_size=vocab_size,
            temperature=0,
            step=decode_step,
            use_cache=mode != "no cache",
        )
        return [time_ms(device, next, tokens)[0] for _ in range(n)]

    yield {"startup, s": sum(times_ms(8)) / 1000, "peak MiB": peak_memory_mb(device)}
    while True:
        first, *others = times_ms(n_tokens)
        yield {"TTFT, ms": first, "ms/token": mean(others)}


def bench_infer(bench: Bench) -> dict:
    """Print the time to the first token and of each further one, for each mode and batch size."""
    bench.forbid_flags("seq_len", "batch_tokens", "micro_batch", "compile")
    if bench.quick:
        n_tokens, prompt_len, batches = 50, 32, (4,)
    else:
        n_tokens, prompt_len, batches = 200, 128, (1, 8)
    length = prompt_len + n_tokens
    cfg = replace(bench.cfg, seq_len=length, batch_tokens=length, micro_batch=1)
    repeats = min(bench.repeats, 3)  # without a cache it takes minutes
    rows = []
    for batch in batches:
        cases = [partial(infer_case, cfg, batch, mode, prompt_len, n_tokens) for mode in MODES]
        no_cache_ms = None
        for mode, row in zip(MODES, measure(cases, repeats)):
            row = dict(batch=batch, mode=mode) | row
            rows.append(row)
            if "note" in row:
                continue
            row["tokens/s"] = 1000 * batch / row["ms/token"]
            total_ms = row["TTFT, ms"] + (n_tokens - 1) * row["ms/token"]
            if mode == "no cache":
                no_cache_ms = total_ms
            if no_cache_ms:
                row[f"KV-cache speedup @{n_tokens}"] = no_cache_ms / total_ms
    note = (
        f"A prompt of {prompt_len} tokens. No cache: all is read again for each token. "
        "TTFT: time to first token."
    )
    print(table("Generation", rows, note))
    return dict(infer=rows)
