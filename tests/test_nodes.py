"""Several nodes on one machine: they train as one, agree, and start again when a rank has died."""

import functools
import json
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
    flags_of,
    make_data,
    refusal,
    run_forked,
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
    join_ranks,
    mean_over_ranks,
    raise_on_all_ranks,
)
from train_gpt import make_config


def hsdp_rank(folder: Path) -> None:
    """A run that continues another one; leaves the weights beside its folder."""
    train_gpt.sample_text = lambda *_: ""  # slow with four ranks
    flags = TINY | dict(data=folder / "data", resume=folder / "whole" / "ckpt_10.pt")
    flags |= dict(parallel="hsdp", micro_batch=2, checkpointing="full", out_dir=folder / "run")
    cfg = make_config(**flags | EVALUATIONS, save_every=5, keep="all")
    model = train_gpt.train(cfg, return_model=True)[1]
    weights = [to_full(p.detach()) for p in model.parameters()]
    torch.save(weights, folder / f"weights{dist.get_rank()}.pt")
    exit_process(0)


EVALUATIONS = dict(eval_every=4, eval_tokens="all")


def test_two_nodes_continue_the_run_of_one_rank_and_one_rank_theirs(data, undisturbed, tmp_path):
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "whole").symlink_to(undisturbed)
    done = run_ranks(tmp_path, __file__, "hsdp", tmp_path, nodes=[ROOT, ROOT], world_size=4)
    assert done.codes == [0, 0, 0, 0], done.stderr
    first, *others = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(4))
    for weights in others:
        assert all(map(torch.equal, weights, first))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert " hsdp, " in log and "4 ranks x 2 grad_accum_steps" in log
    theirs = tmp_path / "run" / "ckpt_15.pt"
    tiny_run(tmp_path / "one", data=data, resume=theirs, **EVALUATIONS)
    for name in ("run", "one"):
        assert_same_run(tmp_path / name, undisturbed)


def test_each_node_makes_the_default_corpus_once(data, tmp_path, monkeypatch):
    made = []

    def make(source, out):
        made.append(source)
        out.symlink_to(data)

    monkeypatch.setattr(run_module, "DATA_DIR", tmp_path)
    monkeypatch.setattr(run_module, "prepare", make)
    for local_rank in (0, 1, 0, 2):
        run_module.open_stream(make_config(**TINY), DistContext(local_rank=local_rank))
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
    """The first of several errors is raised; a mean is over the ranks that have the value."""
    rank = dist_ctx.rank
    for only, found in ((1, "of rank 1"), (None, "of rank 0")):
        with pytest.raises(UserError, match=found) as caught, raise_on_all_ranks():
            if only in (rank, None):
                raise UserError(f"of rank {rank}")
        assert caught.value.printed == (rank != int(found[-1]))
    assert any_rank(rank == 1) and not any_rank(False)
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


def test_nodes_without_a_rendezvous_are_told(monkeypatch):
    """Each node then waits for the others alone, at its own agent's store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = dict(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port)
    for name, value in (place | dict(TORCHELASTIC_USE_AGENT_STORE=True)).items():
        monkeypatch.setenv(name, str(value))
    connect = functools.partial(dist.init_process_group, timeout=timedelta(seconds=0.5))
    monkeypatch.setattr(dist, "init_process_group", connect)
    said = refusal(join_ranks)
    assert f"rank 1 did not meet the other ranks at 127.0.0.1:{store.port}" in said
    assert "start the same command on every node, with torchrun" in said


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
    flags = TINY | EVALUATIONS | dict(data=folder / "data", out_dir=folder / "run")
    exit_process(run_command(train_gpt.main, flags_of(flags | dict(save_every=2))))


def test_torchrun_restarts_all_ranks_when_one_is_killed(data, undisturbed, tmp_path):
    """From what they have saved, by the same command.

    Its store has addresses of dead ranks, unless each start gets a new one (docs/distributed).
    """
    (tmp_path / "data").symlink_to(data)
    env = os.environ | dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    options = "--standalone --nproc_per_node=2 --max-restarts=1 --monitor-interval=0.2".split()
    torchrun = Path(torch.distributed.run.__file__)
    done = run_forked(tmp_path, torchrun, *options, __file__, "mortal", tmp_path, env=env)
    assert done.code == 0, done.stderr[-5000:]
    assert_same_run(tmp_path / "run", undisturbed)
    assert (tmp_path / "run" / "log.txt").read_text().count("resumed from") == 1
    assert (tmp_path / "died").exists()


if __name__ == "__main__":
    functions = dict(mistakes=mistaken_rank, mortal=mortal_rank, hsdp=hsdp_rank)
    functions[sys.argv[1]](Path(sys.argv[2]))
