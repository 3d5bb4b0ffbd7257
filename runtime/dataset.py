"""Opening a dataset on all ranks."""

from pathlib import Path

from common import UserError
from data.prepare import prepare
from data.shards import DATA_DIR
from data.stream import TokenStream
from data.tokenizers import get_tokenizer
from runtime.ranks import DistContext, check_same_on_all_ranks, max_over_ranks, raise_on_all_ranks


def open_stream(folder: str, dist_ctx: DistContext, **options) -> TokenStream:
    """Open a data folder and check it, also across ranks; "": the default corpus, made first where it is not there.

    options: of TokenStream. Raises UserError.
    """
    path = Path(folder or DATA_DIR / "python")
    with raise_on_all_ranks(dist_ctx):
        # Each node has its own standard library
        if not folder and dist_ctx.local_rank == 0 and not (path / "meta.json").exists():
            prepare("python", out=path)
    with raise_on_all_ranks(dist_ctx):
        stream = TokenStream(path, **options)
    check_same_on_all_ranks(dist_ctx, stream.identity(), f"give every node the same data in {path}")
    try:
        stream.tokenizer = get_tokenizer(stream.meta["tokenizer"], stream.vocabulary)
    except UserError:  # tokens suffice to train
        stream.tokenizer = None
    if any(
        max_over_ranks(dist_ctx, stream.tokenizer is None)
    ):  # sampling under FSDP takes all ranks
        stream.tokenizer = None
    return stream
