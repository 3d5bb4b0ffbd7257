"""Open the dataset of a run on all ranks."""

import contextlib
from pathlib import Path

from common.errors import UserError
from data.prepare import prepare
from data.shards import DATA_DIR
from data.stream import TokenStream
from data.tokenizers import get_tokenizer
from runtime.ranks import DistContext, check_same_on_all_ranks, raise_on_all_ranks


def open_stream(cfg, dist_ctx: DistContext) -> TokenStream:
    """Open the folder cfg.data, and check that it is the same on all ranks. Raises UserError.

    By default it is Python's own source code, prepared on first use.
    """
    path = Path(cfg.data or DATA_DIR / "python")
    with raise_on_all_ranks(dist_ctx):
        # Each node prepares it for itself
        if not cfg.data and dist_ctx.local_rank == 0 and not (path / "meta.json").exists():
            prepare("python", out=path)
    with raise_on_all_ranks(dist_ctx):
        stream = TokenStream(
            path,
            seq_len=cfg.seq_len,
            seed=cfg.seed,
            vocab_size=cfg.vocab_size,
            doc_align=cfg.doc_align,
        )
    # For example, a node may lack meta.json, and would assume GPT-2's tokenizer
    facts = {
        f"the shards of {path} with hash": stream.fingerprint()[:12],
        "a meta.json with tokenizer": stream.meta["tokenizer"],
    }
    check_same_on_all_ranks(dist_ctx, facts, f"give every node the same data in {path}")

    # Training does without a tokenizer; sampling needs it on all ranks, as under FSDP all take part
    stream.tokenizer = None
    with contextlib.suppress(UserError):
        with raise_on_all_ranks(dist_ctx):
            tokenizer = get_tokenizer(stream.meta["tokenizer"], stream.vocabulary)
        stream.tokenizer = tokenizer
    return stream
