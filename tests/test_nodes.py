"""Several nodes on one machine: torchrun agents, the ranks that they start, and their deaths."""

import functools
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.run

import train_gpt
from common.errors import UserError, exit_process, run_command
from conftest import (
    ROOT,
    TINY,
    assert_same_run,
    final,
    flags_of,
    forked,
    free_port,
    make_data,
    parsed,
    rows,
    run_main,
    run_ranks,
    tiny_run,
)
from data.shards import write_shard
from ops.parallel import to_full
from runtime import ranks
from runtime import run as run_module
from runtime.ranks import (
    DistContext,
    any_rank,
    gather_objects,
    join_ranks,
    max_over_ranks,
    mean_over_ranks,
    raise_on_all_ranks,
    run_on_rank0,
)
from train_gpt import make_config

CASES = {  # of two nodes of two ranks each
    "ddp_half": "--micro_batch 4 --save_every 10 --keep all",
    "ddp_bf16": "--micro_batch 2 --grad_comm bf16 --bucket_cap_mb 1 --max_steps 5",
    "hsdp": "--parallel hsdp --micro_batch 2 --checkpointing full --save_every 10 --keep all",
    "hsdp_resumed": "--parallel hsdp --micro_batch 4 --resume",
    "hsdp_thin": "--parallel hsdp --micro_batch 4 --n_embd 2 --n_head 1 --n_layer 3 --max_steps 5",
    "hsdp_bf16": "--parallel hsdp --micro_batch 2 --grad_comm bf16 --max_steps 5",
}


def start_node(folder: Path, port: int, *argv, host: bool) -> multiprocessing.Process:
    """Start one of two torchrun agents, with `ARGV` as its rank. host: it has the rendezvous."""
    options = ["--nnodes=2", "--nproc_per_node=1", "--monitor-interval=0.2", "--max-restarts=1"]
    options += ["--rdzv_backend=c10d", "--rdzv_id=test", f"--rdzv_endpoint=localhost:{port}"]
    options += [f"--rdzv_conf=last_call_timeout=1,keep_alive_interval=1,is_host={int(host)}"]
    outputs = folder / "stdout.txt", folder / "stderr.txt"
    return forked(torch.distributed.run.__file__, *options, __file__, *argv, outputs=outputs)


# --------------------------------------------------------------------------------------------------
# The same run


def run_cases(folder: Path) -> None:
    """Train all cases on a rank; report.json says of each if all ranks' weights are equal."""
    train_gpt.sample_text = lambda *_: ""  # slow with four ranks
    report = {}
    for name, line in CASES.items():
        flags = TINY | dict(data=str(folder / "data"), init_from=str(folder / "noisy.pt"))
        if name == "hsdp_resumed":
            line += f" {folder}/ddp_half/ckpt_10.pt"
        if name in ("hsdp_resumed", "hsdp_thin"):
            del flags["init_from"]
        cfg = make_config(**flags | parsed(line), out_dir=str(folder / name))
        model = train_gpt.train(cfg, return_model=True)[1]
        weights = b"".join(to_full(p.detach()).numpy().tobytes() for p in model.parameters())
        hashes = [None] * dist.get_world_size()
        dist.all_gather_object(hashes, hashlib.sha256(weights).hexdigest())
        report[name] = len(set(hashes)) == 1
    if dist.get_rank() == 0:
        (folder / "report.json").write_text(json.dumps(report))
    exit_process(0)


@pytest.fixture(scope="module")
def two_nodes(data, noisy, tmp_path_factory) -> Path:
    """The folder of what two nodes of two ranks each left behind."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "data").symlink_to(data)
    (folder / "noisy.pt").symlink_to(noisy)
    nodes = [ROOT, ROOT]
    done = run_ranks(folder, __file__, "cases", folder, nodes=nodes, world_size=4, timeout=600)
    assert done.codes == [0, 0, 0, 0], done.stderr
    return folder


def assert_same_end(run: Path, whole: Path) -> None:
    """A run that was resumed somewhere has the losses of the whole one, and its last weights."""
    ours, theirs = rows(run, "train_loss"), rows(whole, "train_loss")
    assert ours == pytest.approx(theirs[-len(ours) :], rel=1e-5)
    assert final(run)["step"] == final(whole)["step"]
    for name, w in final(run)["model"].items():
        torch.testing.assert_close(w, final(whole)["model"][name], rtol=1e-3, atol=2e-5)


def test_two_nodes_train_as_one_rank(two_nodes, plain, data, tmp_path):
    # All ranks' weights are equal to the bit
    assert json.loads((two_nodes / "report.json").read_text()) == dict.fromkeys(CASES, True)
    for case in ("ddp_half", "hsdp"):
        assert_same_run(two_nodes / case, plain)
    tiny_run(tmp_path / "thin", data=data, n_embd=2, n_head=1, n_layer=3, max_steps=5)
    assert_same_run(two_nodes / "hsdp_thin", tmp_path / "thin")
    # To bf16's rounding, and not to fp32's
    expected = np.array(rows(plain, "grad_norm")[:5])
    for case in ("ddp_bf16", "hsdp_bf16"):
        norms = np.array(rows(two_nodes / case, "grad_norm")[:5])
        assert 1e-5 < np.abs(norms / expected - 1).max() < 1e-2
    log = (two_nodes / "hsdp" / "log.txt").read_text()
    assert " hsdp, " in log and "4 ranks x 2 grad_accum_steps" in log


def test_checkpoints_of_any_shape_resume_in_any_other(two_nodes, plain, data, tmp_path):
    tiny_run(tmp_path / "one", data=data, resume=two_nodes / "hsdp" / "ckpt_10.pt")
    for folder in (two_nodes / "hsdp_resumed", tmp_path / "one"):
        assert_same_end(folder, plain)


def test_each_node_makes_the_default_corpus_once(data, monkeypatch):
    made = []
    monkeypatch.setattr(run_module, "DATA_DIR", data.parent / "data")
    (data.parent / "data").mkdir(exist_ok=True)
    (data.parent / "data" / "python").unlink(missing_ok=True)

    def make(source, out):
        made.append(source)
        Path(out).symlink_to(data)

    monkeypatch.setattr(run_module, "prepare", make)
    for local_rank in (0, 1, 0, 2):
        dist_ctx = DistContext(torch.device("cpu"), local_rank=local_rank)
        run_module.open_stream(make_config(**TINY), dist_ctx)
    assert made == ["python"]


# --------------------------------------------------------------------------------------------------
# Ranks that cannot work together: one sentence, exit code 2 on all

MISTAKES = {  # case -> its sentence
    "flags": "rank 1 has --max_steps 5, and rank 0 has 4; start all ranks",
    "code": "rank 1 has source files of hash e3b0c44298fc, and rank 0 has",
    "torch": f"rank 1 has PyTorch 2.9.9, and rank 0 has {torch.__version__};",
    "shard_size": "does not divide the 2 ranks; give a divisor of them, or use --parallel fsdp",
    "batch": "cannot be shared evenly by 2 ranks; use a multiple of 64",
    "data": "rank 1 has the shards of other with hash ",
    "no_data": "there is no folder nowhere",
    "unseen": "there is no checkpoint run/ckpt_2.pt; give the path of a ckpt_<step>.pt file that "
    "all ranks can read",
}


def mistaken_rank(folder: Path) -> None:
    """Make every mistake, one after the other, in this node's own working directory."""
    rank = int(os.environ["RANK"])
    more = {
        "flags": f"--max_steps {4 + rank}",
        "shard_size": "--parallel hsdp --shard_size 3",
        "batch": "--batch_tokens 480 --micro_batch 5",
        "data": "--data other",
        "no_data": "--data nowhere",
        "unseen": "--out_dir run --resume auto",
    }
    codes = {}
    for name in MISTAKES:
        flags = flags_of(TINY | dict(data="data", max_steps=4, out_dir=f"out_{name}"))
        with pytest.MonkeyPatch.context() as patch:
            if rank and name == "code":
                patch.setattr(ranks, "SOURCE_FILES", {})
            if rank and name == "torch":
                patch.setattr(torch, "__version__", "2.9.9")
            print(f"== {name}", file=sys.stderr, flush=True)
            codes[name] = run_command(train_gpt.main, flags + more.get(name, "").split())
    check_agreement(join_ranks())
    (folder / f"codes{rank}.json").write_text(json.dumps(codes))
    dist.barrier()
    exit_process(0)


def check_agreement(dist_ctx: DistContext) -> None:
    """What two ranks agree on: errors, largest values, means, what rank 0 returns."""
    rank = dist_ctx.rank

    def fail():
        raise UserError(f"of rank {rank}")

    for only, found in ((0, "of rank 0"), (1, "of rank 1"), (None, "of rank 0")):
        with pytest.raises(UserError, match=found) as caught, raise_on_all_ranks():
            if only in (rank, None):
                fail()
        assert caught.value.printed == (rank != int(found[-1]))
    with pytest.raises(UserError, match="of rank 0"):
        run_on_rank0(fail)
    assert run_on_rank0(lambda: rank + 5) == 5
    assert max_over_ranks([rank, -rank]) == [1, 0]
    assert any_rank(rank == 1) and not any_rank(False)
    assert gather_objects(rank) == [0, 1]
    # A mean is over the ranks that have the value
    own = dict(a=torch.tensor(2.0 + rank))
    if rank:
        own["b"] = 7
    assert mean_over_ranks(own) == dict(a=2.5, b=7.0)


def test_ranks_that_cannot_work_together_are_told_in_one_sentence(data, tmp_path):
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        make_data(node / "data")
        make_data(node / "other")
    write_shard(nodes[1] / "other" / "a_train_1.bin", np.arange(17889, dtype=np.uint16) % 256)
    tiny_run(nodes[0] / "run", data=nodes[0] / "data", max_steps=2)
    done = run_ranks(tmp_path, __file__, "mistakes", tmp_path, nodes=nodes)
    assert done.codes == [0, 0], done
    for rank in range(2):
        assert set(json.loads((tmp_path / f"codes{rank}.json").read_text()).values()) == {2}
    for name, sentence in MISTAKES.items():
        said = [text.split(f"== {name}\n")[1].split("== ")[0] for text in done.stderr]
        (error,) = re.findall("^error.*", "".join(said), re.MULTILINE)
        rank = 1 if name == "unseen" else 0
        assert sentence in error and error.startswith(f"error [rank {rank}]"), (name, said)
    assert not any((node / "out_flags").exists() for node in nodes)


def set_place(monkeypatch, rank: int, port: int, hosted: bool = True) -> None:
    place = dict(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    place["TORCHELASTIC_USE_AGENT_STORE"] = hosted
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank, hosted", [(0, True), (1, True), (0, False), (1, False)])
def test_nodes_without_a_rendezvous_are_told(rank, hosted, data, tmp_path, monkeypatch, capsys):
    """Each node then waits for the others alone, at its own agent's store, or at nobody's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if hosted else free_port()
    connect = functools.partial(dist.init_process_group, timeout=timedelta(seconds=0.5))
    monkeypatch.setattr(dist, "init_process_group", connect)
    set_place(monkeypatch, rank, port, hosted)
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), capsys)
    assert code == 2
    sentence = f"rank {rank} did not meet the other ranks at 127.0.0.1:{port}"
    assert f"error [rank {rank}]: {sentence}" in err
    assert "start the same command on every node, with torchrun" in err
    assert not (tmp_path / "run").exists() and not dist.is_initialized()


# --------------------------------------------------------------------------------------------------
# Ranks and nodes that die


def mortal_rank(folder: Path) -> None:
    """A run in which rank 1 kills itself at step 7, once."""
    step, died = train_gpt.train_step, folder / "died"

    def deadly_step(state, *inputs):
        if state.step == 7 and os.environ["RANK"] == "1" and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(state, *inputs)

    train_gpt.train_step = deadly_step
    flags = TINY | dict(data=folder / "data", out_dir=folder / "run", resume="auto")
    flags |= dict(save_every=2, eval_every=3, micro_batch=2)
    exit_process(run_command(train_gpt.main, flags_of(flags)))


def test_both_nodes_restart_when_a_rank_of_one_is_killed(data, tmp_path, monkeypatch):
    """One restart is enough, though torchrun counts it on one node only.

    Its store also has addresses of dead ranks, unless each start gets a new one (docs/distributed).
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    (tmp_path / "data").symlink_to(data)
    port = free_port()
    nodes = [start_node(tmp_path, port, "mortal", tmp_path, host=host) for host in (True, False)]
    for node in nodes:
        node.join(120)
    codes = [node.exitcode for node in nodes]
    for node in nodes:
        node.terminate()  # its rank ends with it
    assert codes == [0, 0], (tmp_path / "stderr.txt").read_text()[-5000:]
    tiny_run(tmp_path / "whole", data=data, eval_every=3, micro_batch=2)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run" / "log.txt").read_text().count("resumed from") == 1
    assert (tmp_path / "died").exists()


if __name__ == "__main__":
    functions = dict(mistakes=mistaken_rank, mortal=mortal_rank, cases=run_cases)
    functions[sys.argv[1]](Path(sys.argv[2]))
