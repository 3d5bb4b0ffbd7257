"""What the tests share: the tiny model, its data, runs to compare with, and ways to start a run."""

import ast
import dataclasses
import functools
import json
import multiprocessing
import os
import random
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

# Tiny matrices: threads only cost, here and in the processes that are started
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the scripts set them, for faster compilation
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train_gpt
from common.errors import UserError, run_command
from data.shards import write_shard
from data.tokenizers import get_tokenizer
from model import GPT, GPTConfig, optimizer_groups
from runtime.auto import choose_auto_values
from runtime.checkpoint import list_checkpoints, read_checkpoint
from runtime.environment import configure_device
from runtime.flags import parse_flags
from runtime.ranks import join_ranks
from train_gpt import main, make_config, train

ROOT = Path(__file__).resolve().parent

TINY = dict(
    n_layer=2,
    n_head=2,
    n_embd=32,
    seq_len=32,
    batch_tokens=512,
    micro_batch=8,
    max_steps=20,
    log_every=1,
    eval_every="end",
    eval_tokens=2048,
    muon_lr=0.02,
    adam_lr=0.004,
    embed_decay=0.0,
    device="cpu",
    dtype="fp32",
    ngram=0,
    loss_chunk=100,
    short_frac=0.0,
)

# Samples get 40 tokens, more than the context, instead of 256, which cost as much as the runs
continuation = train_gpt.sample_continuation
train_gpt.sample_continuation = lambda *args, seed: continuation(*args[:3], 40, seed)


def make_data(folder: Path, eot: bool = True, seed: int = 0) -> Path:
    """Two training shards and a validation shard of learnable bytes; sequences cross shards."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    words = [bytes(rng.integers(97, 123, n, dtype=np.uint8)) + b" " for n in rng.integers(2, 7, 50)]
    text = b"".join(words[i] for i in rng.integers(0, 50, 9000))
    tokens = np.concatenate(([256], np.frombuffer(text, dtype=np.uint8))).astype(np.uint16)
    tokens[::97] = 256 if eot else 32
    tokens[40::97] = ord("\n")  # what follows is an answer (docs/edits/loss-on-answers-alone.diff)
    parts = {
        "a_train_0.bin": tokens[:11111],
        "a_train_1.bin": tokens[11111:29000],
        "a_val_0.bin": tokens[29000:33333],
    }
    for name, part in parts.items():
        write_shard(folder / name, part)
    meta = dict(tokenizer="bytes", vocab_size=257, eot=256, source="test")
    meta["files"] = {name: dict(tokens=len(part), sha256="") for name, part in parts.items()}
    meta["splits"] = dict(train=dict(tokens=29000), val=dict(tokens=4333))
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def random_gpt(std=0.1, compute_dtype=torch.float32, loss_chunk=0, **shape) -> GPT:
    cfg = GPTConfig(**dict(vocab_size=70, seq_len=24, n_layer=3, n_head=2, n_embd=32) | shape)
    gpt = GPT(cfg, compute_dtype, loss_chunk)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in gpt.parameters():
            p.normal_(0, std, generator=generator)
    return gpt


def stream_of(n_tokens: int, vocab_size: int) -> SimpleNamespace:
    """What automatic values depend on of a TokenStream; its tokens are all the same."""
    train = SimpleNamespace(n_tokens=n_tokens)
    train.read_sequences = lambda starts, length: np.zeros((len(starts), length), np.int64)
    return SimpleNamespace(
        train=train,
        vocab_size=vocab_size,
        seq_len=2**20,  # shortens no context
        num_eval_seqs=lambda eval_tokens: 1,
        eot=256,
        seqs_per_epoch=n_tokens // 32,
    )


def built(**flags):
    """The TrainState of a tiny run, before its first step."""
    cfg, stream, dist_ctx = make_config(**TINY | flags), stream_of(29000, 257), join_ranks()
    configure_device(cfg, dist_ctx)
    cfg = train_gpt.choose_learning_rates(choose_auto_values(cfg, stream, dist_ctx))
    return train_gpt.build(cfg, dist_ctx, stream)


@torch.no_grad()
def add_noise(model: GPT) -> GPT:
    """To every weight: fresh ones hide most gradients behind matrices of zeros."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=generator).to(p.device) * 0.1)
    return model


def assert_loss_follows_its_gradient(gpt: GPT) -> None:
    """With the same random numbers, the loss rises along its gradient as the gradient says."""
    add_noise(gpt)
    idx = torch.randint(257, (8, 32), generator=torch.Generator().manual_seed(3)).to(gpt.device)

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        return gpt(idx, idx)

    params = [p for name, p in gpt.named_parameters() if name.startswith("blocks.")]
    grads = torch.autograd.grad(loss(), params)
    norm = torch.nn.utils.get_total_norm(grads).item()
    losses = []
    for step in (-0.01, 0.02):
        with torch.no_grad():
            torch._foreach_add_(params, grads, alpha=step / norm)
        losses.append(loss().item())
    assert (losses[1] - losses[0]) / 0.02 == pytest.approx(norm, rel=0.01)


def groups_of(model: GPT, **settings) -> list[dict]:
    """Parameter groups by optimizer_groups, with TINY's rates."""
    defaults = dict(optimizer="muon", muon_lr=0.02, adam_lr=0.004, weight_decay=0.05)
    return optimizer_groups(model, **defaults | dict(embed_decay=0.0, max_steps=20) | settings)


def seed_all(seed: int = 0) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
        seed_generator(seed)


def some_batch(n=16, seed=0) -> torch.Tensor:
    """Tokens, int64 (n, 33)."""
    return torch.randint(0, 257, (n, 33), generator=torch.Generator().manual_seed(seed))


@functools.cache
def compiler_works() -> bool:
    try:
        return torch.compile(lambda x: x + 1)(torch.zeros(2)).sum().item() == 2
    except Exception:
        return False


def compile_with(monkeypatch, backend) -> None:
    """Have torch.compile take this backend, and no mode."""
    compiled = torch.compile

    def compile(function, **options):
        return compiled(function, **options | dict(mode=None, options=None, backend=backend))

    monkeypatch.setattr(torch, "compile", compile)


# --------------------------------------------------------------------------------------------------
# Runs: how to start them, and what they left behind


def tiny_run(out_dir, on_step=None, **flags) -> dict:
    """A run of the tiny model with these flags, in this process; returns its summary."""
    return train(make_config(**TINY | flags, out_dir=str(out_dir)), on_step=on_step)


def run_main(argv: list[str], capsys) -> tuple[int, str]:
    """Exit code and standard error of train_gpt.py's command line, run in this process."""
    capsys.readouterr()
    code = run_command(main, argv)
    return code, capsys.readouterr().err


def flags_of(values: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in values.items()]


def parsed(line: str) -> dict:
    """The flags of a command line."""
    return parse_flags(line.split(), train_gpt.Config, {}, "")


def python_process(*argv, env=os.environ) -> dict:
    """Arguments for subprocess: `python ARGV` in the repository, from which scripts can import."""
    path = str(ROOT)
    if env.get("PYTHONPATH"):
        path += os.pathsep + env["PYTHONPATH"]
    args = [sys.executable, *map(str, argv)]
    return dict(args=args, cwd=ROOT, env={**env, "PYTHONPATH": path}, text=True)


def run_python(*argv, timeout=300, env=os.environ) -> subprocess.CompletedProcess:
    return subprocess.run(**python_process(*argv, env=env), capture_output=True, timeout=timeout)


def in_a_fork(env: dict, script, argv: tuple, cwd, outputs: tuple) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), descriptor)
    sys.argv = [str(script), *map(str, argv)]
    runpy.run_path(str(script), run_name="__main__")


def forked(script, *argv, outputs, env=os.environ, cwd=ROOT) -> multiprocessing.Process:
    """Start `python SCRIPT ARGV` as a fork of a process that has imported everything.

    outputs: files for stdout and stderr.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conftest", "torch._dynamo", "torch.distributed.fsdp"])
    env = dict(env) | dict(PYTHONPATH=str(ROOT))
    process = context.Process(target=in_a_fork, args=(env, script, argv, cwd, outputs), daemon=True)
    process.start()
    return process


def run_forked(folder: Path, script, *argv, env=os.environ) -> SimpleNamespace:
    """What `python SCRIPT ARGV` ends with: code, stdout, stderr. script: a path, or code."""
    if not isinstance(script, Path):
        (folder / "script.py").write_text(script)
        script = folder / "script.py"
    outputs = folder / "stdout.txt", folder / "stderr.txt"
    process = forked(script, *argv, outputs=outputs, env=env)
    process.join()
    stdout, stderr = (path.read_text() for path in outputs)
    return SimpleNamespace(code=process.exitcode, stdout=stdout, stderr=stderr)


def start_ranks(folder: Path, script, *argv, nodes=(ROOT,), world_size=2) -> list:
    """Start `script ARGV` as some ranks without torchrun: their processes.

    Their output goes to files in the folder. nodes: the working directories of nodes, which have
    equally many ranks.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks_per_node = world_size // len(nodes)
    shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port, WORLD_SIZE=world_size)
    shared |= dict(TORCHELASTIC_USE_AGENT_STORE=True, LOCAL_WORLD_SIZE=ranks_per_node)
    ranks = []
    for rank in range(world_size):
        node, local_rank = divmod(rank, ranks_per_node)
        place = shared | dict(RANK=rank, LOCAL_RANK=local_rank, GROUP_RANK=node)
        env = os.environ | {name: str(value) for name, value in place.items()}
        outputs = (folder / f"stdout{rank}.txt", folder / f"stderr{rank}.txt")
        ranks.append(forked(script, *argv, outputs=outputs, env=env, cwd=nodes[node]))
    ranks[0].store = store  # lives as long as they do
    return ranks


def run_ranks(folder: Path, script, *argv, timeout=300, **places) -> SimpleNamespace:
    """Start ranks and wait: exit codes, stdout and stderr, by rank.

    A rank that has not noticed five seconds after another failed is ended, as torchrun would.
    """
    ranks = start_ranks(folder, script, *argv, **places)
    deadline = time.monotonic() + timeout
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.02)
    for rank in ranks:
        if rank.exitcode is None:
            rank.kill()
        rank.join()

    def output(name: str) -> list[str]:
        paths = [folder / f"{name}{rank}.txt" for rank in range(len(ranks))]
        return [path.read_text() if path.exists() else "" for path in paths]

    codes = [rank.exitcode for rank in ranks]
    return SimpleNamespace(codes=codes, stdout=output("stdout"), stderr=output("stderr"))


def refusal(function, *args, **options) -> str:
    """The sentence of the UserError that a call raises, or ""; other errors fail the test."""
    try:
        function(*args, **options)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500
        return str(error)
    return ""


def rows(folder, key: str) -> list:
    """The values of `key` in metrics.jsonl, in the order in which they were written."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


def final(folder) -> dict:
    return read_checkpoint(list_checkpoints(Path(folder))[0])


def assert_same_run(a, b, exact=False, rtol=1e-5) -> None:
    """Same losses, gradient norms and weights, to rounding; or to the bit, and optimizer state.

    Run a may have been resumed somewhere in b.
    """
    for key in ("train_loss", "grad_norm", "val_loss"):
        x, y = rows(a, key), rows(b, key)
        assert len(y) >= len(x) > 0
        y = y[-len(x) :]
        np.testing.assert_allclose(x, y, rtol=0 if exact else rtol, err_msg=key)
    ours, theirs = final(a), final(b)
    assert ours["step"] == theirs["step"]
    if exact:
        return assert_weights_equal(a, b)
    assert ours["model"].keys() == theirs["model"].keys()
    for name, weight in theirs["model"].items():
        # Adam moves value embeddings far where a gradient is only rounding
        atol = 1e-4 if name == "value_embed.weight" else 2e-5
        torch.testing.assert_close(ours["model"][name], weight, rtol=1e-3, atol=atol)


def assert_weights_equal(a, b) -> None:
    """Weights and optimizer state of the newest checkpoints are the same, to the bit."""
    ours, theirs = final(a), final(b)
    for part in ("model", "optimizer"):
        torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)


def assert_undisturbed(run, undisturbed) -> None:
    """A run that was disturbed has the losses, norms and weights of the one that was not."""
    ours = final(run)
    for key in ("train_loss", "grad_norm"):
        assert rows(run, key) == rows(undisturbed, key)[: ours["step"]]
    theirs = read_checkpoint(Path(undisturbed) / f"ckpt_{ours['step']}.pt")
    for part in ("model", "optimizer"):
        torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)


@pytest.fixture(scope="session")
def undisturbed(data, tmp_path_factory) -> Path:
    """A run of 20 steps with all its checkpoints, and five evaluations."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    tiny_run(folder, data=data, save_every=1, keep="all", eval_every=4, eval_tokens="all")
    return folder


@pytest.fixture(autouse=True)
def no_process_group_left():
    """A run that ended with an error leaves the process group of its one rank behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="session")
def noisy(data, tmp_path_factory) -> Path:
    """A checkpoint of random weights: fresh ones hide most gradients behind matrices of zeros."""
    folder = tmp_path_factory.mktemp("noisy")
    cfg = make_config(**TINY | dict(data=str(data), out_dir=str(folder / "run"), max_steps=1))
    model = train(cfg, return_model=True)[1]
    checkpoint = final(folder / "run") | dict(model={**add_noise(model).state_dict()})
    torch.save(checkpoint, folder / "noisy.pt")
    return folder / "noisy.pt"


@pytest.fixture(scope="session")
def plain(data, noisy, tmp_path_factory) -> Path:
    """The run that others are compared with: one process, one micro-step, no chunks."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    tiny_run(folder, data=data, init_from=noisy, micro_batch=16, loss_chunk=0)
    return folder


VOCABULARY = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or ROOT.parent / "shared" / "tiktoken_cache")


@pytest.fixture
def gpt2(monkeypatch):
    if not VOCABULARY.is_dir():
        pytest.skip("needs GPT-2's vocabulary in TIKTOKEN_CACHE_DIR")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
    return get_tokenizer("gpt2")


def measured(folder, name: str, flags: str, code: int = 0) -> dict:
    """The JSON of a benchmark run in a tiny form."""
    import bench

    path = folder / "out.json"
    assert run_command(bench.main, [name, *flags.split(), f"--json={path}"]) == code
    report = json.loads(path.read_text())
    assert report["machine"]["torch"] == torch.__version__
    assert report["benchmark"] == name and name in report["command"]
    return report


# --------------------------------------------------------------------------------------------------
# test_train.py after an edit


def pytest_addoption(parser) -> None:
    text = "flags with which test_train.py trains, such as those of your edit"
    parser.addoption("--flags", default="", metavar="'NAME=VALUE ...'", help=text)


def pytest_configure(config) -> None:
    os.environ["TEST_TRAIN_FLAGS"] = config.option.flags  # for the ranks, too
    try:
        edit_flags()
    except UserError as error:
        raise pytest.UsageError(f"--flags: {error}") from None


def edit_flags() -> dict:
    """The flags that --flags names, as n_head=4 or --n_head=4."""
    words = os.environ.get("TEST_TRAIN_FLAGS", "").split()
    flags = parsed(" ".join("--" + word.lstrip("-") for word in words))
    make_config(**flags)  # checks their values
    return flags


def told(error: BaseException) -> str:
    """An error in a few lines: what it says, and where in our files it came from."""
    lines = str(error).strip()[:400].splitlines()[:5]
    said = [f"{type(error).__name__}: {lines[0] if lines else ''}", *lines[1:]]
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT):
            frames.append(f"  {path.relative_to(ROOT)}:{frame.lineno} {frame.name}: {frame.line}")
    return "\n".join(said + frames[-6:])


FAULTS = pytest.StashKey[dict[str, str]]()  # what test_train.py has said -> of which test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Failures of test_train.py are their messages, each once; --tb=long shows all."""
    report = yield
    if report.failed and item.path.name == "test_train.py" and item.config.option.tbstyle == "auto":
        error, text = call.excinfo.value, told(call.excinfo.value)
        if isinstance(error, AssertionError) and call.excinfo.traceback[-1].path == item.path:
            text = str(error).partition("\nassert ")[0]  # without pytest's own explanation
        first = item.config.stash.setdefault(FAULTS, {}).setdefault(text, item.name)
        report.longrepr, report.sections = text, []
        if call.when == "setup" and first != item.name:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"Skipped: waits for {first}")
    return report


def fields_of_config(source: str) -> dict[str, str]:
    """The fields of train_gpt.py's Config in its source: name -> declaration."""
    classes = {node.name: node for node in ast.parse(source).body if hasattr(node, "bases")}
    fields = [node for node in classes["Config"].body if isinstance(node, ast.AnnAssign)]
    return {field.target.id: ast.unparse(field) for field in fields}


def untried_fields() -> list[str]:
    """Fields of Config that the last commit lacks, with their defaults in test_train.py."""
    from test_train import FLAGS

    try:
        command = ["git", "show", "HEAD:./train_gpt.py"]
        committed = subprocess.check_output(command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
    except (OSError, subprocess.CalledProcessError):  # there is no git, or no commit
        return []
    theirs, cfg = fields_of_config(committed), make_config(**FLAGS)
    ours = fields_of_config((ROOT / "train_gpt.py").read_text())
    defaults = {field.name: field.default for field in dataclasses.fields(cfg)}
    edited = [name for name in ours if ours[name] != theirs.get(name)]
    return [name for name in edited if getattr(cfg, name) == defaults[name]]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after pytest's own summary
def pytest_sessionfinish(session):
    """The last line says which flags of an edit have not been tried."""
    result, config = (yield), session.config
    is_meant = any("test_train" in arg for arg in config.args)
    if is_meant and not hasattr(config, "workerinput") and not config.option.collectonly:
        names = untried_fields()
        values = " ".join(f"{name}=..." for name in names)
        if names:
            said = f'not tried: {", ".join(names)}, at the default here; add --flags "{values}"'
            config.get_terminal_writer().line(said)
    return result


# --------------------------------------------------------------------------------------------------
# The whole suite


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's own
def pytest_cmdline_main(config) -> None:
    """The whole suite runs in two processes: a test has one thread."""
    option = config.option
    if config.args_source != pytest.Config.ArgsSource.TESTPATHS or option.keyword:
        return
    if option.markexpr not in config.getini("addopts") or option.usepdb or option.trace:
        return
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    if option.numprocesses is None and option.dist == "no":
        option.numprocesses = 2
        option.dist = "loadfile"  # a file's fixtures are made once
        option.loadscopereorder = False  # files in the order below, instead of by number of tests


# The slowest first, so that neither process waits for the other one's last file
SLOWEST = (
    "runtime dtype layouts model nodes worked_edits train records flags tokenizers sample".split()
)


def pytest_collection_modifyitems(items) -> None:
    ranks = {f"test_{name}.py": rank for rank, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
