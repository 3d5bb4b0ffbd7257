"""Cases of test_benchmarks.py that go wrong. They run in processes of their own, which import nothing else for them."""

import os
import signal
import sys
import time
from pathlib import Path


def endless_case():
    print(os.getpid(), file=sys.stderr, flush=True)
    while True:
        time.sleep(0.1)
    yield


def killed_case():
    yield "ready"
    os.kill(os.getpid(), signal.SIGKILL)


def broken_case():
    yield "ready"
    yield 1 / 0


def missing_file_case():
    yield "ready"
    yield open("/nonexistent/file")


def full_case():
    yield "ready"
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")


def dying_case(flags, unfused):
    """A step of the plain stack takes 20 ms, any other 10; the second process of the plain stack dies at its second.

    The file --out_dir counts the plain stack's processes.
    """
    plain, starts = flags["attn"] == "math", Path(flags["out_dir"])
    if plain:
        with starts.open("a") as file:
            file.write("x")
    yield dict(loss=1.0, tokens=512, flops=1e6, micro_batch=1, peak_mb=1.0, setup_s=0.1, datasheet_flops=None)
    yield 0.02 if plain else 0.01
    if plain and starts.read_text() == "xx":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        yield 0.02 if plain else 0.01


def small_matmul_case(flags):
    """ladder.matmul_case with matrices that take a hundredth of the time."""
    from benchmarks.ladder import matmul_case

    yield from matmul_case(flags, (512, 512, 512))


def failing_rank(flags, repeats, threads, environment):
    """The last of several ranks fails by itself, a second after the others have said that they lost it."""
    os.environ.update(environment)
    world_size = int(environment["WORLD_SIZE"])
    if world_size == 1:
        yield dict(seconds=[0.01], compute=[], predicted=[], counted=[], micro_batch=1, threads=1, peak_mb=1.0)
    if environment["RANK"] != str(world_size - 1):
        raise RuntimeError("Connection closed by peer")
    time.sleep(1)
    if flags["seed"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("the last rank's own mistake")
    yield


# A train_gpt.py of another repository: its loss falls in a line from 5 to 5 - speed * (1 + seed / 10), in a second;
# on the text "worse" --speed is 0.8 whatever is given. It notes the order of its runs, and fails as --how says.
FAKE_TRAINER = r"""
import json, os, sys
from pathlib import Path

flags = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
text, how, speed = Path(flags["data"]).name, flags.get("how", ""), flags.get("speed", "")
with open(Path(__file__).with_name("order.txt"), "a") as file:
    print(flags["n_embd"], text, flags["seed"], speed, file=file)
if how in ("refused", "crashed"):
    print("a warning", "error: by its own words", sep="\n", file=sys.stderr)
    sys.exit(2 if how == "refused" else 1)
if how == "killed":
    os.kill(os.getpid(), 9)
steps, every, folder = int(flags["max_steps"]), int(flags["eval_every"]), Path(flags["out_dir"])
fall = (0.8 if speed and text == "worse" else float(speed or 1)) * (1 + int(flags["seed"]) / 10 if speed else 1)
rows = [dict(step=i, train_time_s=i / steps, val_loss=5 - fall * i / steps) for i in range(every, steps + 1, every)]
if how == "diverged" and flags["seed"] == "1":
    rows[-1]["val_loss"] = None
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [dict(step=1, train_loss=5.0), *rows]))
if how != "gone":
    stopped_by = "signal" if how == "stopped" else "max_steps"
    (folder / "summary.json").write_text(json.dumps(dict(rows[-1], stopped_by=stopped_by)))
"""
