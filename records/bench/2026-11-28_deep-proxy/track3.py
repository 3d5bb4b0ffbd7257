"""Run the speedrun's Track 3 trainer (plain Muon, 3,250 steps to 3.28) at any shape, on our shards.

    python track3.py --peer train_gpt_simple.py --data data/python --n_layer 12 --n_embd 128 \\
        --steps 600 --batch_tokens 8192 --seq_len 512

--peer: records/track_3_optimization/train_gpt_simple.py of KellerJordan/modded-nanogpt. It is
copied with the shape, the data's place, the device and, if given, the rates changed; nothing else
of its recipe. The data is a folder of data/prepare.py with one validation shard. Prints the peer's
own lines: val_loss in nats per token, over the first --val_tokens of the validation split. To
compare, evaluate the whole split on our side, too (--eval_tokens 0). A head_dim other than 128
changes its attention scale in proportion to 1 / sqrt(head_dim).
"""

import argparse
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

p = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
p.add_argument("--peer", required=True)
p.add_argument("--data", required=True)
p.add_argument("--out", default="", help="where its lines go as well")
for name, default in (
    ("n_layer", 12),
    ("n_embd", 768),
    ("head_dim", 128),
    ("seq_len", 1024),
    ("batch_tokens", 524288),
    ("micro_tokens", 65536),
    ("steps", 3250),
    ("vocab_size", 0),
    ("val_tokens", 0),
    ("seed", 0),
):
    p.add_argument(f"--{name}", type=int, default=default)
p.add_argument(
    "--rates", default="", help="embedding,head,vectors,muon instead of .7,.004,.015,.025"
)
p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
p.add_argument("--compile", action="store_true")
a = p.parse_args()

data = Path(a.data).resolve()
shards = {split: sorted(data.glob(f"*{split}*.bin")) for split in ("train", "val")}
n_val = sum(struct.unpack("<3i", f.open("rb").read(12))[2] for f in shards["val"][:1])
micro = max(1, min(a.micro_tokens, a.batch_tokens) // a.seq_len)
val_tokens = min(a.val_tokens or n_val, n_val - 1) // (micro * a.seq_len) * (micro * a.seq_len)
vocab = a.vocab_size
if not vocab:
    import json

    vocab = -(-json.loads((data / "meta.json").read_text())["vocab_size"] // 64) * 64
batch = a.batch_tokens // (micro * a.seq_len) * (micro * a.seq_len)

code = Path(a.peer).read_text()


def put(old, new, count=1):
    global code
    assert code.count(old) >= 1, f"the peer has changed: {old!r} is not in it"
    code = code.replace(old, new)


put("import os\n", "import os, itertools\n")
put("file_iter = iter(files)", "file_iter = itertools.cycle(files)")
put("seq_len=1024", f"seq_len={a.seq_len}")
put("data/fineweb10B/fineweb_val_*.bin", "val/*.bin")
put("data/fineweb10B/fineweb_train_*.bin", "train/*.bin")
put("val_tokens = 20 * 524288", f"val_tokens = {val_tokens}")
put("batch_size = 8 * 64 * 1024", f"batch_size = {batch}")
put("mbs = 64", f"mbs = {micro}")
put(
    "GPT(vocab_size=50304, num_layers=12, model_dim=768)",
    f"GPT(vocab_size={vocab}, num_layers={a.n_layer}, model_dim={a.n_embd})",
)
put("head_dim=128", f"head_dim={a.head_dim}")
put("scale=0.12", f"scale={0.12 * (128 / a.head_dim) ** 0.5}")
put("train_steps = 3250", f"train_steps = {a.steps}")
put(
    "val_step_freq = 125 if step / train_steps < 0.9 else 25",
    f"val_step_freq = {max(1, a.steps // 4)}",
)
put("for _ in range(num_trials):\n", f"torch.manual_seed({a.seed})\nfor _ in range(num_trials):\n")
if a.rates:
    embed, head, vectors, muon = a.rates.split(",")
    put("lr=0.7)", f"lr={embed})")
    put("lr=0.004)", f"lr={head})")
    put("lr=0.015)", f"lr={vectors})")
    put("lr=0.025,", f"lr={muon},")
if a.device == "cpu":
    put('torch.device("cuda", int(os.environ["LOCAL_RANK"]))', 'torch.device("cpu")')
    put("torch.cuda.set_device(device)\n", "")
    put('backend="nccl", device_id=device', 'backend="gloo"')
    put("pin_memory=True", "pin_memory=False")
    put('device="cuda"', 'device="cpu"')
    put(").cuda()", ")")
    put("torch.cuda.get_device_name(device)", "'a CPU'")
    # GCC 11 and 12 make wrong bf16 of Inductor's code otherwise (ops/compile.py)
    flag = "off -fno-tree-loop-distribute-patterns"
    code = (
        "from torch._inductor import config\n"
        f"config.cpp.enable_floating_point_contract_flag = {flag!r}\n" + code
    )
if not a.compile:
    put("@torch.compile\n", "")
    put("model.compile(dynamic=False)\n", "\n")

with tempfile.TemporaryDirectory() as folder:
    work = Path(folder)
    for split, files in shards.items():
        (work / split).mkdir()
        for f in files:
            (work / split / f.name).symlink_to(f)
    (work / "peer.py").write_text(code)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=1",
        "peer.py",
    ]
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # torchrun sets 1
    process = subprocess.Popen(
        command, cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = open(a.out, "w") if a.out else None
    for line in process.stdout:
        if ("val_loss" in line and "print0" not in line) or "rror" in line:
            print(line, end="", flush=True)
        if log:
            log.write(line)
    sys.exit(process.wait())
