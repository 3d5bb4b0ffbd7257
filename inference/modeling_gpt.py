"""The model for Transformers, in one file that `export.py --to hf` puts beside the weights:

    model = AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

It gives the same logits as model.py, without cache, training and kernels. The export compares them.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

# Multipliers of xxHash and MurmurHash; products fit into int64
HASH_A = 0x9E3779B1
HASH_B = 0x85EBCA6B
HASH_MODULUS = 1 << 31


class TrainGPTConfig(PretrainedConfig):
    """The fields of model.py's GPTConfig, and eot.

    eot: token that starts a document; tokens do not attend across documents. None if they do.
    """

    model_type = "train_gpt"

    attribute_map = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_len",
    }


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def shift_right(x, n: int):
    """Shift x (B, T) right by n positions, with zeros in the first."""
    return F.pad(x, (n, 0))[:, : x.size(1)]


def apply_rotary_emb(x, cos, sin):
    half = cos.size(-1)
    x1, x2, rest = x.split((half, half, x.size(-1) - 2 * half), dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin, rest), dim=-1)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.rotary_dim = cfg.n_embd // cfg.n_head // 4 * 2
        self.qkv = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=False)
        self.gate = nn.Linear(min(16, cfg.n_embd), cfg.n_head, bias=False)
        self.proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x, cos, sin, doc_starts, mask, value_embed):
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.n_head, -1)).split(self.n_head, dim=2)
        gate = 2 * self.gate(x[..., :16]).sigmoid()
        v = v + gate[..., None] * value_embed.view(v.shape)
        q, k = norm(q), norm(k)

        # Partial key offset: the final dimensions are from the previous token in the same document
        k_rot, k_pass = k.split((self.rotary_dim, k.size(-1) - self.rotary_dim), dim=-1)
        k_pass = F.pad(k_pass[:, :-1], (0, 0, 0, 0, 1, 0))
        k_pass = k_pass.masked_fill(doc_starts[..., None, None], 0)
        k = torch.cat((k_rot, k_pass), dim=-1)

        q = apply_rotary_emb(q, cos, sin).transpose(1, 2)
        k = apply_rotary_emb(k, cos, sin).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=mask)
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fc = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=False)
        self.proj = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x):
        return self.proj(F.leaky_relu(self.fc(x), 0.5).square())


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.attn = Attention(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x, *context):
        x = x + self.attn(norm(x), *context)
        return x + self.mlp(norm(x))


class TrainGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TrainGPTConfig
    accepts_loss_kwargs = False  # otherwise Trainer assumes that the loss is a sum

    def __init__(self, config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.value_embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.ngrams = nn.Embedding(config.ngram_rows, config.n_embd) if config.ngram > 1 else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        """Return the inputs of a step: all tokens each time, because there is no cache."""
        return dict(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    def embed(self, idx, doc):
        """Embed tokens idx (B, T) and the n-grams that end at each. doc: the tokens' documents."""
        x = self.wte(idx)
        code = idx + 1  # 0 stands for "no token"
        for n in range(1, self.config.ngram):
            same_doc = doc == shift_right(doc, n)
            code = (code * HASH_A + shift_right(idx + 1, n) * same_doc) % HASH_MODULUS
            x = x + self.ngrams(((code * HASH_B) >> 7) % self.config.ngram_rows)
        return x

    def forward(
        self,
        input_ids,
        attention_mask=None,
        labels=None,
        output_hidden_states=False,
        output_attentions=False,
        **unused,
    ):
        """Return logits, fp32 (B, T, vocab_size), and the loss if labels (B, T) are given.

        Rows of input_ids (B, T) may be padded on either side, where attention_mask (B, T) is 0.
        output_hidden_states: also return the input of each block and of the head.
        """
        cfg = self.config
        if output_attentions or cfg.output_attentions:
            raise ValueError("this model returns no attentions; remove output_attentions")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        # Number the documents; padding before the first token is a document, too
        doc_starts = (attention_mask > 0) & (attention_mask.cumsum(1) == 1)
        if cfg.eot is not None:
            doc_starts = doc_starts | (input_ids == cfg.eot)
        doc = doc_starts.cumsum(1)

        x = norm(self.embed(input_ids, doc))
        value_embed = self.value_embed(input_ids)
        position = torch.arange(input_ids.size(1), device=input_ids.device)

        # Rotary position embedding
        half = cfg.n_embd // cfg.n_head // 4
        channel = torch.arange(half, device=position.device)
        frequency = cfg.rope_theta ** -(channel / half)
        angle = position[:, None, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        # Attention within a document; beyond seq_len, every layer has a sliding window
        same_doc = doc[:, None, :, None] == doc[:, None, None, :]
        distance = position[:, None] - position
        pattern, _, width = cfg.window.partition(":")
        output_hidden_states = output_hidden_states or cfg.output_hidden_states
        hidden_states = ()
        for i, block in enumerate(self.blocks):
            window = cfg.seq_len
            if pattern[i % len(pattern)] == "S":
                window = min(window, int(width or max(1, cfg.seq_len // 4)))
            mask = same_doc & (distance >= 0) & (distance < window)
            if output_hidden_states:
                hidden_states += (x,)
            x = block(x, cos, sin, doc_starts, mask, value_embed)

        x = norm(x)
        if output_hidden_states:
            hidden_states += (x,)
        logits = self.head(x).float()
        if cfg.softcap:
            logits = cfg.softcap * torch.tanh(logits / cfg.softcap)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=hidden_states or None)
