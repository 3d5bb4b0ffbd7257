"""The first lines of a run's log: what is in effect, and what was derived from its flags."""

def describe_run(
    cfg, model, micro_batch: int, stream: TokenStream, dist_ctx: DistContext
) -> list[str]:
    """What is in effect in a run and what was derived from its flags, as lines for the console and log.txt."""
    device, meta, world_size = dist_ctx.device, stream.meta, dist_ctx.world_size
    parallel = (
        "one process" if world_size == 1 else cfg.parallel if cfg.parallel != "auto" else "ddp"
    )
    grad_accum_steps = cfg.batch_tokens // cfg.seq_len // world_size // micro_batch
    muon = f"muon_lr {cfg.muon_lr:.4g}, " if cfg.optimizer == "muon" else ""
    ngrams = (
        f", n-grams to {cfg.ngram}, ngram_dropout {cfg.ngram_dropout:.2g}" if cfg.ngram > 1 else ""
    )
    n_eval, n_all = (stream.num_eval_seqs(n) * cfg.seq_len for n in (cfg.eval_tokens, 0))
    mode = getattr(model.blocks[0], "ac_mode", "none")  # chosen with the micro-batch
    part = (
        ""
        if n_eval == n_all
        else dict(first=" (the first)", spread=" spread over the validation split")
    )
    n_params = sum(p.numel() for p in model.parameters())
    n_frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    lines = [
        software_versions(device),
        f"device: {device_summary(dist_ctx)}, {cfg.dtype}, compile {cfg.compile}, {parallel}, attention {cfg.attn}, "
        f"loss_chunk {cfg.loss_chunk}, checkpointing {mode}, matmul precision {torch.get_float32_matmul_precision()}",
        f"data: {stream.folder} ({meta['source']}), {stream.train.n_tokens:,} + {stream.val.n_tokens:,} tokens, "
        f"tokenizer {meta['tokenizer']}{' (assumed: there is no meta.json)' if meta.get('assumed') else ''}, "
        f"evaluation on {n_eval:,} tokens{part and part[stream.eval_subset]}",
        f"model: n_layer {cfg.n_layer}, n_embd {cfg.n_embd}, n_head {cfg.n_head}, {n_params:,} parameters"
        f"{f' ({n_frozen:,} frozen)' * (n_frozen > 0)}, "
        f"{model.flops_per_token() / 1e6:,.1f} MFLOP a token; {muon}adam_lr {cfg.adam_lr:.4g}, "
        f"weight_decay {cfg.weight_decay:g}{ngrams}",
        f"batch: {cfg.batch_tokens:,} tokens = {world_size} ranks x {grad_accum_steps} grad_accum_steps x {micro_batch} "
        f"micro_batch x {cfg.seq_len} seq_len; {cfg.max_steps:,} steps{' (about)' if cfg.minutes else ''}, "
        f"{cfg.batch_tokens * cfg.max_steps / (stream.seqs_per_epoch * cfg.seq_len):.2f} epochs",
    ]
    if device.type == "cuda" and any(map(os.environ.get, ALLOC_CONF_VARIABLES)):
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        lines.append(
            "allocator: " + ", ".join(f"{name} {value}" for name, value in settings.items())
        )
    if stream.tokenizer is None:
        lines.append("no samples will be printed, as a rank has no tokenizer for this data")
    return lines
