"""`bench.py train`: time, speed, memory and start-up of configurations; the ladder of flags."""

import json
import math
import os
import shlex
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median

import torch

from benchmarks import harness
from benchmarks.harness import Bench, progress, table, trainer_flags
from common.errors import TrainerError, UserError
from common.values import largest_divisor
from runtime.device import DTYPES, large_matmul_flops, peak_memory_mb, select_device
from runtime.run_folder import REPO
from train_gpt import Config

# The ladder: its first configuration, and the name of each step -> the flags that it changes
BASE = (
    "--dtype fp32 --matmul_precision highest --attn math --compile off --loss_chunk 0 --fp8 false "
    "--checkpointing none"
)
LADDER = {
    "matmul precision high (TF32)": "--matmul_precision high",
    "bf16": "--dtype bf16",
    "fused attention": "--attn sdpa",
    "compile": "--compile",
    "blockwise attention (compiled)": "--attn blocked",
    "chunked loss": "--loss_chunk auto",
    "auto micro-batch": "--micro_batch auto",
    "max-autotune": "--compile max-autotune",
    "fp8": "--fp8",
    "selective checkpointing": "--checkpointing selective",
    "full checkpointing": "--checkpointing full",
}


def attention_cases(bench: Bench) -> list[list[str]]:
    """List the attention backends that train on the device, in a group per length of sequences."""
    bench.forbid_flags("attn", "seq_len")
    lengths, backends = (512, 1024, 2048), "math sdpa blocked"
    if bench.device.type == "cuda":
        lengths, backends = (1024, 4096, 16384), "math sdpa flash efficient cudnn flex varlen"
    groups = []
    for length in lengths:
        sizes = with_micro_batch(bench, f"--seq_len {length}", 8192)
        groups.append([f"{sizes} --attn {name}" for name in backends.split()])
    return groups


def memory_cases(bench: Bench) -> list[list[str]]:
    """List the modes of activation checkpointing and, on CUDA, an offloaded optimizer."""
    bench.forbid_flags("checkpointing", "offload")
    modes = [f"--checkpointing {mode}" for mode in ("none", "selective", "full")]
    if bench.device.type == "cuda":
        modes.append("--offload optimizer")
    return [[with_micro_batch(bench, mode, 8192) for mode in modes]]


CASES = dict(attention=attention_cases, memory=memory_cases)


def with_micro_batch(bench: Bench, flags: str, n_tokens: int) -> str:
    """Add a micro-batch of at most n_tokens to the flags, unless one is given."""
    cfg = bench.config(flags)
    if not cfg.batch_tokens:
        raise UserError("the benchmark needs a batch of a given size; give --batch_tokens a number")
    ranks = max(bench.options.ranks or [int(os.environ.get("WORLD_SIZE", 1))])
    n_seqs = max(1, cfg.batch_tokens // cfg.seq_len // ranks)
    micro_batch = cfg.micro_batch or largest_divisor(n_seqs, n_tokens // cfg.seq_len)
    return f"{flags} --micro_batch {micro_batch}"


# --------------------------------------------------------------------------------------------------
# Measurements


def step_case(cfg: Config, n_cases: int) -> Iterator[dict]:
    """Yield memory and start-up time of a configuration; then the time per step, and the speed.

    n_cases: how many of them share the device while they are compared.
    """
    start = time.perf_counter()
    if n_cases > 1 and select_device(cfg.device).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.9 / n_cases)
    state, batch = harness.build_state(cfg)
    harness.time_steps(state, batch, 3)  # compiles, warms up
    n_steps = max(1, 2**14 // state.cfg.batch_tokens)  # per measurement, the same on all ranks
    device, world_size = state.dist_ctx.device, state.dist_ctx.world_size
    yield {
        "micro_batch": state.micro_batch,
        "peak MiB": peak_memory_mb(device),
        "startup, s": time.perf_counter() - start,
    }
    peak = world_size * large_matmul_flops(device, DTYPES[state.cfg.dtype])
    while True:
        ms = harness.time_steps(state, batch, n_steps)
        speed = 1000 * state.cfg.batch_tokens / ms
        mfu = speed * state.raw_model.flops_per_token() / peak
        yield {"ms/step": ms, "tokens/s": speed, "MFU (measured matmul peak)": mfu}


def measure_cases(bench: Bench, cases: list[str]) -> list[dict]:
    """Measure flags of the trainer, interleaved; return a row per case.

    The speedup of a case is the median ratio of the first case's times to its own.
    """
    running = [partial(step_case, bench.config(flags), len(cases)) for flags in cases]
    rows = []
    for flags, measured in zip(cases, harness.measure(running, bench.repeats)):
        row = dict(Config=flags or "base") | measured
        rows.append(row)
        if row is not rows[0]:
            pairs = zip(rows[0].get("values", []), row.get("values", []))
            ratios = [a["ms/step"] / b["ms/step"] for a, b in pairs]
            row["speedup vs first"] = median(ratios or [math.nan])
    return rows


def bench_train(bench: Bench) -> list[dict] | None:
    """Print the ladder, or the cases that --cases, --flags and --ranks describe.

    Under torchrun, measure its ranks; only rank 0 returns rows.
    """
    bench.forbid_flags("init_from", "resume")
    options = bench.options
    if not (options.cases or options.flags or options.ranks or "WORLD_SIZE" in os.environ):
        return climb_ladder(bench)
    groups = CASES[options.cases](bench) if options.cases else []
    if len(options.flags) == 1:  # compared with none
        groups.append(["", *options.flags])
    elif options.flags or not groups:
        groups.append(options.flags or [""])
    rows = []
    for cases in groups:
        progress(f"measuring: {', '.join(cases)}")
        if options.ranks:
            rows += chain(*(measure_ranks(bench, flags) for flags in cases))
        else:
            rows += measure_cases(bench, cases)
    if os.environ.get("RANK", "0") != "0":
        return None
    note = (
        "Speedup: median ratio of interleaved steps to the first case (of the same --seq_len). "
        "With --ranks one case follows another, and memory is that of one rank. Efficiency: speed "
        "per rank, relative to the first number of ranks, for the same global batch."
    )
    print(table("Steps", rows, note))
    return rows


# --------------------------------------------------------------------------------------------------
# Several ranks


def measure_ranks(bench: Bench, flags: str) -> list[dict]:
    """Measure a case under torchrun on each number of ranks; return a row for each."""
    rows = []
    per_rank = []  # tokens/s
    for ranks in bench.options.ranks:
        row = run_ranks(bench, flags, ranks) | dict(Config=f"{flags or 'base'}, --ranks {ranks}")
        per_rank.append(row.get("tokens/s", math.nan) / ranks)
        row["efficiency, %"] = 100 * per_rank[-1] / per_rank[0]
        rows.append(row)
    return rows


def run_ranks(bench: Bench, flags: str, ranks: int) -> dict:
    """Measure flags on so many ranks; return their row, or a note on failure."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [REPO / "bench.py", "train", f"--repeats={bench.repeats}", f"--json={out}"]
        command += [f"--{key}={value}" for key, value in bench.flags.items()]
        try:
            harness.run_python(*command, *shlex.split(flags))
        except TrainerError as error:
            return dict(Config="", note=f"FAILED: {error}")
        return json.loads(out.read_text(encoding="utf-8"))["train"][0]


# --------------------------------------------------------------------------------------------------
# The ladder


def climb_ladder(bench: Bench) -> list[dict]:
    """Print the ladder: flags added one by one, each measured beside the configuration so far.

    A step that is slower is not kept.
    """
    bench.forbid_flags(*trainer_flags(BASE.split()), "minutes")
    stack = with_micro_batch(bench, BASE, 8192 if bench.device.type == "cuda" else 1024)
    rows = [measure_cases(bench, [stack])[0] | dict(Config="fp32 eager")]
    total = 1.0
    for name, flags in LADDER.items():
        progress(f"measuring: + {name}")
        _, row = measure_cases(bench, [stack, f"{stack} {flags}"])
        row["Config"] = f"+ {name}"
        rows.append(row)
        if "values" not in row:
            continue
        # nan if the configuration so far failed; this one then replaces it
        ratio = row["speedup vs last kept"] = row.pop("speedup vs first")
        row["cumulative speedup"] = total * ratio
        if ratio < 1:
            row["note"] = "slower: not kept"
            continue
        total = row["cumulative speedup"] if ratio >= 1 else total
        stack += f" {flags} --micro_batch {row['micro_batch']}"
    note = (
        "Speedup: median ratio of interleaved steps to the most recent configuration that was "
        "kept; the cumulative column multiplies these ratios. MFU: of the matmuls' speed in the "
        "same dtype."
    )
    print(table("The ladder", rows, note))
    return rows
