def sub(path, pairs):
    s=open(path).read()
    for a,b in pairs:
        assert s.count(a)==1,(path,s.count(a),a)
        s=s.replace(a,b)
    open(path,'w').write(s)
R='/tmp/w/gx/repo/'
open(R+'opts.py','w').write('OPTS = {}\n')
sub(R+'model.py',[
('from common import derive_seed\n','from common import derive_seed\nfrom opts import OPTS\n'),
('''    return F.relu(x).square()
''','''    if OPTS.get("slope"):
        return F.leaky_relu(x, OPTS["slope"]).square()
    return F.relu(x).square()
'''),
('''        q, k = norm(qk).split(self.n_head, dim=2)
''','''        q, k = (OPTS.get("qk", 1.0) * norm(qk)).split(self.n_head, dim=2)
'''),
('''        # All heads side by side again
''','''        if OPTS.get("excl"):
            own = F.normalize(v[:, :, -q.size(2) :].float(), dim=-1).to(y.dtype)
            y = y - OPTS["excl"] * (y * own).sum(-1, keepdim=True) * own
        # All heads side by side again
'''),
('''        x = x + self.attn(norm(x), ctx)
        return x + self.mlp(norm(x))
''','''        p = OPTS.get("drop", 0.0)
        def drop(t):
            return F.dropout(t, p, self.training) if p else t
        if hasattr(self, "lam"):
            x = self.lam[0] * x + self.lam[1] * ctx.x0
        x = x + drop(self.attn(norm(x), ctx))
        if OPTS.get("repeat"):
            x = x + drop(self.mlp(norm(x)))
            x = x + drop(self.attn(norm(x), ctx))
        return x + drop(self.mlp(norm(x)))
'''),
('''        self.mlp = MLP(cfg)
''','''        self.mlp = MLP(cfg)
        if OPTS.get("x0"):
            self.lam = nn.Parameter(torch.tensor([1.0, 0.0]))
'''),
('''    kv_cache: object = None  # this layer's''','''    x0: object = None
    kv_cache: object = None  # this layer's'''),
('''        self.value_embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
''','''        self.value_embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        if OPTS.get("vel"):
            self.vel = nn.ModuleList(nn.Embedding(cfg.vocab_size, cfg.n_embd) for _ in range(cfg.n_layer - 1))
'''),
('''        x = norm(x)
        for layer''','''        x = norm(x)
        if OPTS.get("edrop") and self.training:
            x = F.dropout(x, OPTS["edrop"])
        if OPTS.get("tdrop") and self.training:  # whole tokens' embeddings
            x = x * (torch.rand(x.shape[:2] + (1,), device=x.device) >= OPTS["tdrop"])
        x0 = x
        for layer'''),
('''                value_embed=value_embed,
''','''                value_embed=value_embed if not OPTS.get("vel") or layer == 0 else self.vel[layer - 1](idx).to(self.compute_dtype),
                x0=x0,
'''),
('''    ParamSpec(r"wte\\.weight", init=normal(1.0), lr_mul=75.0),
''','''    ParamSpec(r"wte\\.weight", init=normal(1.0), lr_mul=75.0),
    ParamSpec(r"vel\\.\\d+\\.weight", init=zeros, lr_mul=2.5),
    ParamSpec(r"blocks\\.\\d+\\.lam", optim="adam", lr_mul=1.0),
'''),
('''    for name, param in model.named_parameters():
        # How this parameter is optimized
        spec = get_spec(name, param)
''','''    for name, param in model.named_parameters():
        # How this parameter is optimized
        spec = get_spec(name, param)
        if name == "wte.weight" and "wte" in OPTS:
            spec = spec._replace(lr_mul=OPTS["wte"])
        if name == "ngrams.weight" and "nglr" in OPTS:
            spec = spec._replace(lr_mul=OPTS["nglr"])
        if name == "value_embed.weight" and "velr" in OPTS:
            spec = spec._replace(lr_mul=OPTS["velr"])
'''),
('''    x = normalize_rows(newton_schulz(x))
''','''    if OPTS.get("muoneq"):
        x = normalize_rows(x)
    x = normalize_rows(newton_schulz(x))
'''),
('''            values = torch.empty(param.shape, device="cpu")
            param.copy_(init(values, generator))
''','''            values = torch.empty(param.shape, device="cpu")
            param.copy_(init(values, generator))
            if OPTS.get("fc") and name.endswith("mlp.fc.weight"):
                param.mul_(OPTS["fc"])
'''),
])
sub(R+'train_gpt.py',[
('from data.stream import','from opts import OPTS\nfrom data.stream import'),
('''        return (1 - progress) / cfg.cooldown_frac
''','''        f = OPTS.get("floor", 0.0)
        return f + (1 - f) * ((1 - progress) / cfg.cooldown_frac) ** OPTS.get("power", 1.0)
'''),
('''    return 0.95 - 0.1 * max(0.0, 1 - step / 300)
''','''    return OPTS.get("mom", 0.95) - 0.1 * max(0.0, 1 - step / 300)
'''),
])
