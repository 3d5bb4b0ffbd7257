"""Several nodes on one machine: torchrun agents that meet by c10d, the ranks that they start, and their deaths."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import get_args_parser

import train_gpt
from benchmarks import network
from conftest import (
    ROOT,
    TINY,
    assert_same_run,
    final,
    flags_of,
    make_data,
    python_process,
    rows,
    run_main,
    run_ranks,
    tiny_run,
)
from data.shards import RunError, UserError, write_shard
from runtime import derived, ranks, start
from runtime.memory import agreed_peak
from test_train import COMPILED, CPU, compiler_works, plain_loop, worker
from train_gpt import make_config

NODE_CASES = {
    "ddp_half": dict(micro_batch=4, save_every=10, keep=0, max_steps=20),
    "ddp_bf16": dict(micro_batch=2, grad_comm="bf16", bucket_cap_mb=1, max_steps=5),
    "hsdp": dict(parallel="hsdp", micro_batch=4, save_every=10, keep=0),
    "hsdp_accum": dict(parallel="hsdp", micro_batch=2, checkpointing="full"),
    "hsdp_resumed": dict(parallel="hsdp", micro_batch=4, resume="ddp_half/ckpt_10.pt", init_from=""),
    "hsdp_thin": dict(
        parallel="hsdp", micro_batch=4, n_embd=2, n_head=1, n_layer=3, init_from="", max_steps=5, vocab_size=257
    ),
    "hsdp_bf16": dict(parallel="hsdp", micro_batch=2, grad_comm="bf16", max_steps=5),
}
MORE_NODE_CASES = {
    "fsdp": dict(parallel="fsdp", micro_batch=4),
    "fsdp_bf16": dict(parallel="fsdp", micro_batch=2, grad_comm="bf16", max_steps=5),
    "hsdp_offload": dict(parallel="hsdp", micro_batch=4, offload="optimizer"),
    "hsdp_one_group": dict(parallel="hsdp", micro_batch=4, shard_size=4),
    "hsdp_alone": dict(parallel="hsdp", micro_batch=4, shard_size=1),
    "hsdp_selective": dict(parallel="hsdp", micro_batch=4, checkpointing="selective"),
    "ddp_resumed": dict(micro_batch=4, resume="hsdp/ckpt_10.pt", init_from=""),
    "fsdp_resumed": dict(parallel="fsdp", micro_batch=4, resume="hsdp/ckpt_10.pt", init_from=""),
}
COMPILED_NODE_CASES = {
    "hsdp_compiled": COMPILED | dict(parallel="hsdp", micro_batch=4, checkpointing="full", max_steps=6)
}
STARTED: list[subprocess.Popen] = []  # agents
RENDEZVOUS = ("--rdzv_backend=c10d", "--rdzv_id=test")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(autouse=True)
def no_agent_stays():
    """What a failed test has started ends with it."""
    yield
    for agent in STARTED:
        for pid in ranks_of(agent) if agent.poll() is None else []:
            kill(pid)
        agent.kill()
    STARTED.clear()


def start_node(port: int, output: Path, *argv, host=None, nnodes="2", ranks=2, options=()):
    """One torchrun agent of several (Popen), with `ARGV` as its ranks. host: whether it has the rendezvous."""
    hosts = "" if host is None else f",is_host={int(host)}"
    options = (*options, f"--rdzv_conf=last_call_timeout=1,keep_alive_interval=1{hosts}")
    torchrun = ("-m", "torch.distributed.run", f"--nnodes={nnodes}", f"--nproc_per_node={ranks}", *RENDEZVOUS)
    env = os.environ | dict(
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
    )  # else a node that comes back never meets the others
    process = python_process(*torchrun, f"--rdzv_endpoint=localhost:{port}", *options, __file__, *argv, env=env)
    with open(output, "a") as file:
        STARTED.append(subprocess.Popen(**process, stdout=file, stderr=file))
    return STARTED[-1]


# ---------------------------------------------------------------------------------------------------------------------
# The same run


def run_two_nodes(folder: Path, data: Path, noisy: Path, which: str) -> Path:
    (folder / "data").symlink_to(data)
    (folder / "noisy.pt").symlink_to(noisy)
    port, output = free_port(), folder / "output.txt"
    nodes = [start_node(port, output, "cases", folder, which) for _ in range(2)]
    assert [node.wait(600) for node in nodes] == [0, 0], output.read_text()
    return folder


@pytest.fixture(scope="module")
def two_nodes(data, noisy, tmp_path_factory) -> Path:
    """The folder of what two nodes of two ranks each left behind."""
    return run_two_nodes(tmp_path_factory.mktemp("nodes"), data, noisy, "few")


def assert_equal_to_one_rank(folder, plain, data, noisy, cases) -> None:
    expected = plain_loop(data, noisy, steps=1)[1]
    for case in cases:
        assert_same_run(folder / case, plain)
        for rank in range(4):
            for name, grad in torch.load(folder / f"{case}.grads{rank}.pt").items():
                torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-7)


def assert_rounded(folder, plain, case) -> None:
    """Its gradient norms are those of the plain run to bf16's rounding, and not to fp32's."""
    ours, theirs = (torch.tensor(rows(run, "grad_norm")[:5]) for run in (folder / case, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0)
    assert (ours / theirs - 1).abs().max() > 1e-5


def test_two_nodes_train_as_one_rank(two_nodes, plain, data, noisy, tmp_path):
    report = json.loads((two_nodes / "report.json").read_text())
    assert set(report.values()) == {True} and set(report) == set(NODE_CASES)  # ranks agree to the bit
    assert_equal_to_one_rank(two_nodes, plain, data, noisy, ["ddp_half", "hsdp", "hsdp_accum"])
    tiny_run(tmp_path / "thin", data=data, **NODE_CASES["hsdp_thin"] | dict(parallel="auto"))
    assert_same_run(two_nodes / "hsdp_thin", tmp_path / "thin")
    for case in ("ddp_bf16", "hsdp_bf16"):
        assert_rounded(two_nodes, plain, case)
    log = (two_nodes / "hsdp" / "log.txt").read_text()
    assert "FSDP2, 1/2 of the weights a rank" in log and "4 ranks x 1 grad_accum_steps" in log


def test_checkpoints_of_any_shape_go_on_in_any_other(two_nodes, plain, data, tmp_path):
    tiny_run(tmp_path / "one", data=data, resume=two_nodes / "hsdp" / "ckpt_10.pt")
    for run in (two_nodes / "hsdp_resumed", tmp_path / "one"):
        assert_same_end(run, plain)


def assert_same_end(run: Path, whole: Path) -> None:
    """The run, which was resumed somewhere, has the losses of the whole one, and its last weights."""
    ours, theirs = rows(run, "train_loss"), rows(whole, "train_loss")
    assert ours == pytest.approx(theirs[-len(ours) :], rel=1e-5) and final(run)["step"] == final(whole)["step"]
    for name, w in final(run)["model"].items():
        torch.testing.assert_close(w, final(whole)["model"][name], rtol=1e-3, atol=2e-5)


@pytest.mark.soak
@pytest.mark.skipif(not shutil.which("ip") or os.geteuid(), reason="needs root and iproute2, for network namespaces")
@pytest.mark.parametrize("n_nodes, n_ranks", [(3, 1), (2, 2)])
def test_nodes_with_networks_of_their_own(n_nodes, n_ranks, data, noisy, tmp_path):
    shape = dict(batch_tokens=384, micro_batch=1)
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "noisy.pt").symlink_to(noisy)
    with network.namespaces(n_nodes) as nodes, open(tmp_path / "output.txt", "w") as output:
        env = os.environ | dict(PYTHONPATH=str(ROOT))
        argv = (__file__, "cases", tmp_path, json.dumps(shape))
        started = [
            network.start_agent(node, i, nodes, *map(str, argv), ranks=n_ranks, env=env, stdout=output, stderr=output)
            for i, node in enumerate(nodes)
        ]
        assert [process.wait(300) for process in started] == [0] * n_nodes, (tmp_path / "output.txt").read_text()
    tiny_run(tmp_path / "one", data=data, init_from=noisy, **shape)
    for case in ("ddp", "fsdp", "hsdp"):
        assert_same_run(tmp_path / case, tmp_path / "one")
        assert f"= {n_nodes * n_ranks} ranks x" in (tmp_path / case / "log.txt").read_text()


@pytest.mark.soak
def test_two_nodes_in_every_way(data, noisy, plain, tmp_path):
    folder = run_two_nodes(tmp_path, data, noisy, "all")
    exact = [case for case in MORE_NODE_CASES if "resumed" not in case and "bf16" not in case]
    assert_equal_to_one_rank(folder, plain, data, noisy, exact)
    for case in ("ddp_resumed", "fsdp_resumed"):
        assert_same_end(folder / case, plain)
    assert_rounded(folder, plain, "fsdp_bf16")
    if compiler_works():
        tiny_run(tmp_path / "one", data=data, init_from=noisy, max_steps=6)
        assert_same_run(folder / "hsdp_compiled", tmp_path / "one")


def test_each_node_makes_the_default_corpus_once(data, monkeypatch):
    made = []
    monkeypatch.setattr(start, "prepare", lambda source, out: made.append(source))
    monkeypatch.setattr(start, "data_folder", lambda cfg: data)
    for local_rank in (0, 1, 2):
        start.open_stream(make_config(**TINY), ranks.DistContext(CPU.device, local_rank=local_rank))
    assert made == ["python"]


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that cannot work together: one sentence, exit code 2 on all

MISTAKES = {  # case -> its sentence
    "flags": "rank 1 on HOST has --max_steps 5, and rank 0 on HOST has 4; start all ranks alike",
    "code": "rank 1 on HOST has a model.py of hash 000000000000, and rank 0 on HOST has",
    "torch": f"rank 1 on HOST has PyTorch 2.9.9, and rank 0 on HOST has {torch.__version__};",
    "clock": "the clock of rank 1 is +3600 s from that of rank 0",
    "shard_size": "--shard_size 3 does not divide the 2 ranks; use --shard_size 2, or --parallel fsdp",
    "batch": "which 2 ranks cannot share evenly; use --batch_tokens 512, or 1 or 3 ranks",
    "data": "rank 1 on HOST has other/a_train_1.bin",
    "no_data": "there is no data folder nowhere",
    "unseen": "there is no checkpoint run/ckpt_2.pt",
    "memory": "a rank ran out of memory in trying 8 sequences at once; give --micro_batch 4",
}


def mistaken_rank(folder: Path) -> None:
    """What each of two nodes does in the test below, in a working directory of its own: every mistake in turn."""
    rank, flags, codes = int(os.environ["RANK"]), TINY | dict(data="data", max_steps=4), {}
    sha256, real_time = ranks.sha256_of_file, time.time
    changes = {
        "code": lambda patch: patch.setattr(
            ranks, "sha256_of_file", lambda path: "0" * 64 if path.name == "model.py" else sha256(path)
        ),
        "torch": lambda patch: patch.setattr(torch, "__version__", "2.9.9"),
        "clock": lambda patch: patch.setattr(ranks, "time", SimpleNamespace(time=lambda: real_time() + 3600)),
    }

    def out_of_memory(micro_batch):
        if rank:
            raise torch.OutOfMemoryError("out of memory")
        return 1.0

    def probe(*_):
        dist_ctx = start.launch(make_config(device="cpu"))
        assert agreed_peak(lambda _: 5.0 + rank, 1, 8, dist_ctx) == 6.0  # the largest
        return agreed_peak(out_of_memory, 8, 8, dist_ctx)

    changes["memory"] = None
    more = {
        "flags": dict(max_steps=4 + rank),
        "shard_size": dict(parallel="hsdp", shard_size=3),
        "batch": dict(batch_tokens=480, micro_batch=5),
        "data": dict(data="other"),
        "no_data": dict(data="nowhere"),
        "unseen": dict(out_dir="run", resume="auto"),
    }
    for name in MISTAKES:
        with pytest.MonkeyPatch.context() as patch:
            if name == "memory":
                patch.setattr(train_gpt, "fit_memory", probe)
                more[name] = dict(micro_batch=0)
            elif rank and name in changes:
                changes[name](patch)
            print(f"== {name}", file=sys.stderr, flush=True)
            codes[name] = train_gpt.main(flags_of(flags | dict(out_dir=f"out_{name}") | more.get(name, {})))
    (folder / f"codes{rank}.json").write_text(json.dumps(codes))
    dist.barrier()
    ranks.exit_process(0)


def test_ranks_that_cannot_work_together_are_told_in_one_sentence(data, tmp_path):
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        make_data(node / "data")
        make_data(node / "other")
    tokens = torch.arange(17889).numpy().astype("uint16") % 256
    write_shard(nodes[1] / "other" / "a_train_1.bin", tokens)
    tiny_run(nodes[0] / "run", data=nodes[0] / "data", max_steps=2)
    done = run_ranks(tmp_path, __file__, "mistakes", tmp_path, nodes=nodes)
    assert done.codes == [0, 0], done
    outputs = [said.replace(os.uname().nodename, "HOST") for said in done.stderr]
    for rank in range(2):
        assert set(json.loads((tmp_path / f"codes{rank}.json").read_text()).values()) == {2}
    for name, sentence in MISTAKES.items():
        said = [line for text in outputs for line in text.split(f"== {name}\n")[1].split("== ")[0].splitlines()]
        errors = [line for line in said if line.startswith("error")]
        assert len(errors) == 1 and sentence in errors[0], (name, said)
        assert errors[0].startswith(f"error [rank {int(name == 'unseen')}]"), errors
    assert not any((node / "out_flags").exists() for node in nodes)


@pytest.mark.parametrize("rank, hosted", [(0, True), (1, True), (0, False), (1, False)])
def test_nodes_without_a_rendezvous_are_told(rank, hosted, data, tmp_path, monkeypatch, capsys):
    """Each node then waits for the others alone, at its own agent's store, or at nobody's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if hosted else free_port()
    monkeypatch.setattr(ranks, "PATIENCE_S", 1.5)
    place = dict(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    for name, value in (place | dict(TORCHELASTIC_USE_AGENT_STORE=hosted)).items():
        monkeypatch.setenv(name, str(value))
    code, err = run_main(flags_of(TINY | dict(data=data, out_dir=tmp_path / "run")), capsys)
    found = f"rank {1 - rank} of 2 did not come to" if hosted else f"rank {rank} cannot reach the rendezvous at"
    assert code == 2 and f"error [rank {rank}]: {found} 127.0.0.1:{port}" in err and err.count("error") == 1
    assert "start the same command on every node, with torchrun" in err
    assert not (tmp_path / "run").exists() and not dist.is_initialized()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_meet_in_a_store_that_dead_ones_have_used(device, monkeypatch):
    """A rank that has died said its word there; those of now get a store of their own, or are told what differs."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("word of rank 1", "said before")
    store.set("0//cpu//gloo", "an address of a rank that has died")
    place = dict(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port)
    for name, value in (place | dict(TORCHELASTIC_USE_AGENT_STORE=True)).items():
        monkeypatch.setenv(name, str(value))
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(ranks.rendezvous, 0, 2, "cpu")]
        time.sleep(0.1)  # rank 0 answers the dead one first
        met.append(pool.submit(ranks.rendezvous, 1, 2, device))
        if device == "cpu":
            ours, theirs = (one.result(30) for one in met)
            ours.set("key", "value")
            assert theirs.get("key") == b"value" and not theirs.check(["0//cpu//gloo"])
            return
        errors = [one.exception(30) for one in met]
    assert {str(error) for error in errors} == {"rank 1 runs on cuda, and rank 0 on cpu; give all the same --device"}
    assert [error.printed for error in errors] == [False, True]


# ---------------------------------------------------------------------------------------------------------------------
# Nodes that die


def mortal_rank(folder: Path, out: str) -> None:
    """A run whose steps take a while, so that it can be killed in the middle of everything."""
    step = train_gpt.train_step

    def slow_step(*arguments):
        time.sleep(0.1)
        return step(*arguments)

    train_gpt.train_step = slow_step
    flags = TINY | dict(data=folder / "data", out_dir=folder / out, max_steps=120, save_every=2, eval_every=3)
    ranks.exit_process(train_gpt.main(flags_of(flags | dict(resume="auto", micro_batch=2))))


def last_step(run: Path) -> int:
    """The newest step in metrics.jsonl; 0 where there is none."""
    found = (
        re.findall(r'"step": (\d+)', (run / "metrics.jsonl").read_text()) if (run / "metrics.jsonl").exists() else []
    )
    return int(found[-1]) if found else 0


def ranks_of(agent: subprocess.Popen) -> list[int]:
    """The processes that an agent has started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(agent.pid)], capture_output=True, text=True).stdout
    return [int(pid) for pid in listed.split()]


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


DEATHS = ("rank", "node", "agent", "told")  # SIGKILL to a rank, to torchrun and its ranks, to it alone; SIGTERM to it


def killed_nodes(folder: Path, kills: int) -> dict:
    """A job on one to two nodes (elastic) whose ranks and nodes are killed until there were `kills`; what happened.

    The first node has the rendezvous, so that its agent stays. A killed second node comes back after a while.
    """
    rng, output, report = random.Random(0), folder / "output.txt", dict.fromkeys(DEATHS, 0) | dict(worlds=set())
    options, runs = ("--max-restarts=1000", "--monitor-interval=0.5"), []

    def start(port, out, host):
        argv = ("mortal", folder, out)
        return start_node(port, output, *argv, host=host, nnodes="1:2", ranks=1, options=options)

    def wait_for_progress(run, agents, patience=120):
        since, deadline = last_step(run), time.monotonic() + patience
        while last_step(run) <= since and all(agent.poll() is None for agent in agents):
            assert time.monotonic() < deadline, output.read_text()[-5000:]
            time.sleep(0.05)

    def deaths():
        return sum(report[kind] for kind in DEATHS)

    while deaths() < kills:
        run, port = folder / f"run{len(runs)}", free_port()
        runs.append(run)
        nodes = [start(port, run.name, host) for host in (True, False)]
        while True:
            wait_for_progress(run, nodes)
            if any(node.poll() is not None for node in nodes):
                break
            time.sleep(rng.random() * 0.5)
            if deaths() < kills:
                kind = rng.choice(["rank", *DEATHS])
                hit = rng.choice(nodes) if kind == "rank" else nodes[1]
                victims = ranks_of(hit)
                if not victims:
                    continue
                report[kind] += 1
                if kind != "rank":
                    hit.terminate() if kind == "told" else hit.kill()
                for victim in victims if kind in ("rank", "node") else []:
                    kill(victim)
                if kind != "rank":
                    hit.wait(60)
                    time.sleep(rng.random() * 12)  # the other goes on alone, if it notices in time
                    nodes[1] = start(port, run.name, False)
        # torchrun waits 300 s for one that has left; one that came too late waits for a rendezvous that is over
        assert nodes[0].wait(400) == 0, output.read_text()[-5000:]
        log = (run / "log.txt").read_text()
        report["worlds"] |= set(re.findall(r"= (\d) ranks x", log))
        report["resumed"] = report.get("resumed", 0) + log.count("resumed from")
    return report | dict(runs=[run.name for run in runs])


@pytest.mark.soak
def test_nodes_that_die_and_come_back(data, tmp_path):
    (tmp_path / "data").symlink_to(data)
    whole = tiny_run(tmp_path / "whole", data=data, max_steps=120, eval_every=3, micro_batch=2)
    report = killed_nodes(tmp_path, 30)
    print(report)
    assert report["worlds"] == {"1", "2"} and all(report[kind] for kind in DEATHS)
    for name in report["runs"]:
        assert_same_end(tmp_path / name, tmp_path / "whole")
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["stopped_by"] == "max_steps" and summary["val_loss"] == pytest.approx(
            whole["val_loss"], rel=1e-5
        )


@pytest.mark.parametrize(
    "node, stopped_by, ends", [("0", "SIGTERM", False), ("1", "signal", True), ("1", "max_steps", False)]
)
def test_a_node_that_is_told_to_stop_leaves_the_others_to_their_torchrun(node, stopped_by, ends, monkeypatch):
    monkeypatch.setenv("GROUP_RANK", node)
    monkeypatch.setattr(ranks, "gather_objects", lambda dist_ctx, ours: [("0", True), ("0", False), ours])
    with pytest.raises(RunError, match="another node was told to stop") if ends else contextlib.nullcontext():
        ranks.check_stop(CPU, ["SIGTERM"] * (node == "0"), stopped_by)


def test_world_sizes_that_can_share_a_batch_are_named():
    cfg = make_config(**TINY | dict(batch_tokens=12 * 32, micro_batch=2))
    with pytest.raises(UserError, match="which 5 ranks cannot share evenly; use --batch_tokens 320, or 1 or 2 or 3 or"):
        derived.seqs_per_rank(cfg, 5)
    with pytest.raises(UserError, match="does not divide the 3 sequences that each rank takes .* or 1 or 2 or 3 or 6"):
        derived.seqs_per_rank(cfg, 4)


# ---------------------------------------------------------------------------------------------------------------------
# docs/distributed.md

PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(f"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def check_torchrun(words: list[str]) -> None:
    """torchrun knows its options and the trainer its flags; what a shell would fill in stands for itself."""
    options, _, flags = " ".join(words).partition(" train_gpt.py ")
    launch, unknown = get_args_parser().parse_known_args([*options.split(), "train_gpt.py"])
    newer = set() if torch.__version__ >= "2.13" else {"--shutdown-timeout=240"}
    assert launch.nproc_per_node == "8" and set(unknown) <= newer
    make_config(**train_gpt.parse_args(flags.replace("--resume auto", "").split()))


def test_launch_scripts_are_right():
    assert len(blocks("bash")) == 4 and "#SBATCH" in blocks("bash")[2]
    for script in blocks("bash"):
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert checked.returncode == 0 and not checked.stderr, checked.stderr
        whole = script.replace("\\\n", "").replace('"', "").replace("$SLURM_NNODES", "2")
        for line in re.findall("torchrun (.*)", whole):
            check_torchrun(line.split())


def test_kubernetes_job_is_right():
    yaml = pytest.importorskip("yaml")
    (text,) = blocks("yaml")
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_torchrun(container["command"][1:])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8 and job["spec"]["completions"] == 2
    assert pod["subdomain"] == service["metadata"]["name"] and pod["restartPolicy"] in ("Never", "OnFailure")
    assert f"{job['metadata']['name']}-0.{pod['subdomain']}:29500" in " ".join(container["command"])
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    if what == "cases":
        shapes = NODE_CASES | (MORE_NODE_CASES if rest[0] == "all" else {})
        if rest[0] == "all" and compiler_works():
            shapes |= COMPILED_NODE_CASES
        if rest[0].startswith("{"):
            shapes = {kind: json.loads(rest[0]) | dict(parallel=kind) for kind in ("ddp", "fsdp", "hsdp")}
        worker(Path(folder), shapes)
    elif what == "mistakes":
        mistaken_rank(Path(folder))
    else:
        mortal_rank(Path(folder), *rest)
