"""The model as transformers loads it, in one file that `export.py --to hf` puts beside the weights:

model = AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

The same computation as model.py's, without its cache, training and kernels; the export compares their logits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

HASH_A, HASH_B, HASH_MODULUS = 0x9E3779B1, 0x85EBCA6B, 1 << 31


class TrainGPTConfig(PretrainedConfig):
    model_type = "train_gpt"

    def __init__(
        self,
        vocab_size: int = 257,
        seq_len: int = 1024,
        n_layer: int = 2,
        n_head: int = 1,
        n_embd: int = 128,
        window: str = "L",
        ngram: int = 0,
        ngram_rows: int = 16384,
        softcap: float = 15.0,
        rope_theta: float = 10000.0,
        doc_eot: int
        | None = None,  # the token that starts a document, which sees no other; None: documents see others
        **kwargs,
    ):
        self.vocab_size, self.seq_len, self.n_layer = vocab_size, seq_len, n_layer
        self.n_head, self.n_embd = n_head, n_embd
        self.window, self.ngram, self.ngram_rows, self.softcap = window, ngram, ngram_rows, softcap
        self.rope_theta, self.doc_eot = rope_theta, doc_eot
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = (
            n_embd,
            n_layer,
            n_head,
        )  # their names
        self.max_position_embeddings = seq_len
        super().__init__(**kwargs)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(-1)
    x1, x2, rest = x.split((half, half, x.size(-1) - 2 * half), dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin, rest), dim=-1)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head, self.rotary_dim = cfg.n_head, cfg.n_embd // cfg.n_head // 4 * 2
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)
        self.gate = nn.Linear(cfg.n_embd, cfg.n_head, bias=False)
        self.proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, mask: Tensor, values: Tensor
    ) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3 * self.n_head, -1).split(self.n_head, 2)
        q, k, v = norm(q), norm(k), v + 2 * self.gate(x).sigmoid()[..., None] * values.view(v.shape)
        before = F.pad(k[:, :-1, :, self.rotary_dim :], (0, 0, 0, 0, 1, 0)).masked_fill(
            starts[..., None, None], 0
        )
        k = torch.cat((k[..., : self.rotary_dim], before), dim=-1)
        q, k, v = (
            rotate(q, cos, sin).transpose(1, 2),
            rotate(k, cos, sin).transpose(1, 2),
            v.transpose(1, 2),
        )
        return self.proj(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        )


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fc = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=False)
        self.proj = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.relu(self.fc(x)).square())


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.attn, self.mlp = Attention(cfg), MLP(cfg)

    def forward(self, x: Tensor, *context) -> Tensor:
        x = x + self.attn(norm(x), *context)
        return x + self.mlp(norm(x))


class TrainGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TrainGPTConfig
    accepts_loss_kwargs = False  # else Trainer takes the loss for a sum

    def __init__(self, config: TrainGPTConfig):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.value_embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.ngrams = nn.Embedding(config.ngram_rows, config.n_embd) if config.ngram > 1 else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs
    ) -> dict:
        return dict(
            input_ids=input_ids, attention_mask=attention_mask
        )  # all of them each time: there is no cache

    def embed(self, ids: Tensor, documents: Tensor) -> Tensor:
        x, code = self.wte(ids), ids + 1
        for back in range(1, self.config.ngram):
            same = documents == F.pad(documents, (back, 0), value=-1)[:, : ids.size(1)]
            code = (
                code * HASH_A + F.pad(ids + 1, (back, 0))[:, : ids.size(1)] * same
            ) % HASH_MODULUS
            x = x + self.ngrams(((code * HASH_B) >> 7) % self.config.ngram_rows)
        return x

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **unused,
    ):
        """All (B, T), rows padded on either side; logits fp32 (B, T, vocab_size)."""
        cfg, length = self.config, input_ids.size(1)
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        starts = (seen > 0) & (seen.cumsum(1) == 1)  # padding before it is another document
        if cfg.doc_eot is not None:
            starts = starts | (input_ids == cfg.doc_eot)
        documents, place = starts.cumsum(1), torch.arange(length, device=input_ids.device)
        same = (documents[:, None, :, None] == documents[:, None, None, :]) & (
            place <= place[:, None]
        )
        half = cfg.n_embd // cfg.n_head // 4
        frequency = cfg.rope_theta ** -(
            torch.arange(half, device=place.device, dtype=torch.float64) / half
        )
        angle = (place[:, None] * frequency.float())[:, None]
        x, values = norm(self.embed(input_ids, documents)), self.value_embed(input_ids)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        pattern, _, width = cfg.window.partition(":")
        width = min(int(width or max(1, cfg.seq_len // 4)), cfg.seq_len)
        for i, block in enumerate(
            self.blocks
        ):  # beyond seq_len, attention is a sliding window in every layer
            window = width if pattern[i % len(pattern)] == "S" else cfg.seq_len
            mask = same & (place > place[:, None] - window)
            x = block(x, cos, sin, starts, mask, values)
        logits = self.head(norm(x)).float()
        logits = cfg.softcap * torch.tanh(logits / cfg.softcap) if cfg.softcap else logits
        loss = (
            None
            if labels is None
            else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        )
        return CausalLMOutput(loss=loss, logits=logits)
