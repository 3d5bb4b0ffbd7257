"""The model for Transformers, in one file that `export.py --to hf` puts beside the weights:

    model = AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

It gives the same logits as model.py, without cache, training and kernels. The export compares them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

# Multipliers of xxHash and MurmurHash; products fit into int64
HASH_A = 0x9E3779B1
HASH_B = 0x85EBCA6B


class TrainGPTConfig(PretrainedConfig):
    """The fields of model.py's GPTConfig, and more.

    eot: token that starts a document; tokens do not attend across documents. None if they do.
    windows: how many keys a query attends to in each layer.
    skips: the layers whose inputs the final two also read.
    """

    model_type = "train_gpt"

    attribute_map = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_len",
    }


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def previous_token(x: Tensor, doc_starts: Tensor) -> Tensor:
    """Return the previous token's x (B, T, ...); zeros where a document starts."""
    starts = doc_starts.view(*doc_starts.shape, *[1] * (x.dim() - 2))
    return x.roll(1, dims=1).masked_fill(starts, 0)


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


class Block(nn.Module):
    """One transformer layer: attention, then an MLP."""

    def __init__(self, cfg: TrainGPTConfig, layer: int):
        super().__init__()
        C = cfg.n_embd
        self.n_head = cfg.n_head
        attn = dict(qkv=linear(C, 3 * C), gate=linear(min(16, C), cfg.n_head), proj=linear(C, C))
        self.attn = nn.ModuleDict(attn)
        self.mlp = nn.ModuleDict(dict(fc=linear(C, 4 * C), proj=linear(4 * C, C)))
        self.previous_in = nn.Parameter(torch.zeros(C))
        self.previous_out = nn.Parameter(torch.zeros(C))
        has_skips = cfg.skips and layer >= cfg.n_layer - 2
        self.skip = nn.Parameter(torch.zeros(len(cfg.skips))) if has_skips else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        doc_starts: Tensor,
        mask: Tensor,
        value_embed: Tensor,
        skips: list[Tensor],
    ) -> Tensor:
        earlier = 0
        if self.skip is not None:
            earlier = sum(weight * skip for weight, skip in zip(self.skip, skips))

        h = norm(x + earlier)
        qkv = self.attn.qkv(h).unflatten(-1, (3 * self.n_head, -1))
        qk, v = qkv.split((2 * self.n_head, self.n_head), dim=2)
        gate = 2 * self.attn.gate(h[..., :16]).sigmoid()
        v = v + gate[..., None] * value_embed.view(v.shape)

        # Partial key offset: the final dimensions are from the previous token in the same document
        half = cos.size(-1)
        x1, x2, rest = norm(qk).tensor_split((half, 2 * half), dim=-1)
        q_rest, k_rest = rest.split(self.n_head, dim=2)
        k_rest = previous_token(k_rest, doc_starts)

        # Rotary position embedding of the others
        rest = torch.cat((q_rest, k_rest), dim=2)
        qk = torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin, rest), dim=-1)

        q, k = qk.transpose(1, 2).split(self.n_head, dim=1)
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=mask)
        x = x + self.attn.proj(y.transpose(1, 2).flatten(2))

        h = norm(x + earlier)
        h = h + self.previous_in * previous_token(h, doc_starts)
        y = self.mlp.proj(F.leaky_relu(self.mlp.fc(h), 0.5).square())
        return x + y + self.previous_out * previous_token(y, doc_starts)


class TrainGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TrainGPTConfig

    def __init__(self, config: TrainGPTConfig):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.value_embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.ngrams = nn.Embedding(config.ngram_rows, config.n_embd) if config.ngram > 1 else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.head = linear(config.n_embd, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: object
    ) -> dict:
        """Return the inputs of a step: all tokens each time, because there is no cache."""
        return dict(input_ids=input_ids, attention_mask=attention_mask)

    def embed(self, idx: Tensor, doc_starts: Tensor) -> Tensor:
        """Embed tokens idx (B, T) and the n-grams that end at each, which end at documents."""
        x = self.wte(idx)
        code = previous = idx + 1  # 0 stands for "no token"
        for _ in range(1, self.config.ngram):
            previous = previous.roll(1, dims=1).masked_fill(doc_starts, 0)
            code = (code * HASH_A + previous) % 2**31
            x = x + self.ngrams(((code * HASH_B) >> 7) % self.config.ngram_rows)
        return x

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **unsupported: object,
    ) -> CausalLMOutput:
        """Return logits, fp32 (B, T, vocab_size), and the loss if labels (B, T) are given.

        Rows of input_ids (B, T) may be padded on either side, where attention_mask (B, T) is 0.
        position_ids (B, T): a text starts where they are 0, so that a row may hold several.
        num_items_in_batch: the summed loss is divided by it; by default, by the number of labels.
        Raises ValueError for other arguments of Transformers, unless they are None or False.
        """
        cfg = self.config
        unsupported.pop("return_dict", None)  # a ModelOutput can be indexed like a tuple
        refused = [k for k, v in unsupported.items() if v is not None and v is not False]
        refused += [k for k in ("output_hidden_states", "output_attentions") if getattr(cfg, k)]
        if refused:
            raise ValueError(f"this model does not support {', '.join(refused)}; remove it")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if position_ids is None:
            position_ids = attention_mask.cumsum(1) - 1

        # Number the documents; padding before the first token is a document, too
        text_starts = (position_ids == 0) & (attention_mask > 0)
        text_starts[:, 0] = True
        doc_starts = text_starts
        if cfg.eot is not None:
            doc_starts = text_starts | (input_ids == cfg.eot)
        doc = doc_starts.cumsum(1)

        x = norm(self.embed(input_ids, doc_starts))
        value_embed = self.value_embed(input_ids)

        # Rotary position embedding
        half = cfg.n_embd // cfg.n_head // 4
        frequency = cfg.rope_theta ** -(torch.arange(half, device=x.device) / half)
        angle = position_ids[..., None, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        # Attention within a document; beyond seq_len, every layer has a sliding window
        column = torch.arange(input_ids.size(1), device=x.device)
        causal = (doc[:, None, :, None] == doc[:, None, None]) & (column[:, None] >= column)
        distance = position_ids[:, None, :, None] - position_ids[:, None, None]
        skips = []
        for layer, (block, window) in enumerate(zip(self.blocks, cfg.windows)):
            if layer in cfg.skips:
                skips.append(x)
            mask = causal & (distance < window)
            x = block(x, cos, sin, doc_starts, mask, value_embed, skips)

        logits = self.head(norm(x)).float()
        if cfg.softcap:
            logits = cfg.softcap * torch.tanh(logits / cfg.softcap)
        loss = None
        if labels is not None:
            # A text's first token has nothing to be predicted from; Trainer counts it after padding
            if num_items_in_batch is None:
                num_items_in_batch = (labels[:, 1:] != -100).sum()
            targets = labels.masked_fill(text_starts, -100)[:, 1:]
            loss = F.cross_entropy(logits[:, :-1].mT, targets, reduction="sum") / num_items_in_batch
        return CausalLMOutput(loss=loss, logits=logits)
