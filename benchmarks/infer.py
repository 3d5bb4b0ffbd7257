"""`bench.py infer`: prefill and decode, without a KV cache, with one, compiled, in int8."""

import itertools
import statistics

import torch

from benchmarks.harness import Bench, build_state, measure, median_min_max, table, timed
from inference.generation import compile_decode_step, freeze, generate
from inference.int8 import quantize
from runtime.device import peak_memory_mb

MODES = ("no cache", "KV cache", "KV cache, compiled", "KV cache, int8", "KV cache, compiled, int8")


@torch.no_grad()
def infer_case(flags: dict, batch: int, mode: str, prompt: int, n_tokens: int):
    """Yields seconds to warm up; then those to each of n_tokens."""
    state, stream, _ = build_state(flags)
    model, device, vocab_size = state.raw_model, state.dist_ctx.device, stream.meta["vocab_size"]
    if "int8" in mode:
        quantize(model)
    freeze(model)  # as sample.py does
    step = compile_decode_step(device) if "compiled" in mode else None
    idx = torch.randint(vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0)).to(
        device
    )

    def token_times(n: int) -> list[float]:
        drawn = generate(
            model,
            list(idx),
            n_tokens=n_tokens,
            vocab_size=vocab_size,
            temperature=0,
            step=step,
            use_cache=mode != "no cache",
        )
        return [*itertools.accumulate(timed(device, lambda: next(drawn))[0] for _ in range(n))]

    yield {"startup, s": token_times(8)[-1], "peak MiB": peak_memory_mb(device)}
    while True:
        yield token_times(n_tokens)


def bench_infer(bench: Bench) -> dict:
    bench.refuse("seq_len", "batch_tokens", "micro_batch", "compile")
    n_tokens, prompt, batches = (50, 32, (4,)) if bench.quick else (200, 128, (1, 8))
    flags, rows = (
        bench.flags
        | dict(seq_len=prompt + n_tokens, batch_tokens=prompt + n_tokens, micro_batch=1),
        [],
    )
    for batch in batches:
        cases = [(infer_case, flags, batch, mode, prompt, n_tokens) for mode in MODES]
        group = measure(cases, min(bench.repeats, 3))  # without a cache it takes minutes
        for mode, row in zip(MODES, group):
            rows.append(dict(batch=batch, mode=mode) | row)
            if "note" not in row:
                rows[-1] |= median_min_max([1000 * times[0] for times in row["values"]], "TTFT, ms")
                ms = [1000 * (times[-1] - times[0]) / (n_tokens - 1) for times in row["values"]]
                rows[-1] |= median_min_max(ms, "ms/token")
                rows[-1]["tokens/s"] = 1000 * batch / rows[-1]["ms/token"]
                ratios = [
                    slow[-1] / times[-1]
                    for slow, times in zip(group[0].get("values", []), row["values"])
                ]
                rows[-1][f"KV-cache speedup @{n_tokens}"] = (
                    statistics.median(ratios) if ratios else None
                )
    note = f"A prompt of {prompt} tokens. No cache: all is read again for each token. TTFT: time to first token."
    print(table("Generation", rows, note))
    return dict(infer=rows)
