"""``bytelm``: a byte-level transformer language model over the source files of the Python standard library (``stdlib_bytes``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ratchet_contract.errors import UserError
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.data.order import BatchIs, shard
from ratchet_worker.task import LossResult, Parts, Sums, TaskContext
from ratchet_worker.tasks.stdlib_bytes import load_corpus

_VOCABULARY = 256
_LONGEST_GRAM = 4
_KNUTH = 2654435761  # 2^32 / golden ratio, The Art of Computer Programming, vol. 3, 6.4
# Flash attention on the CPU, plain mathematics if it does not support the dtype: both give the same bits each time.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class Windows:
    """A data set of overlapping windows: sample i is bytes ``i * context`` to ``(i + 2) * context`` of ``data``."""

    def __init__(self, data: torch.Tensor, context: int, digest: str) -> None:
        self.data, self.context, self._digest = data, context, digest

    def __len__(self) -> int:
        return max(0, len(self.data) // self.context - 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index * self.context : (index + 2) * self.context]

    def digest(self) -> str:
        return self._digest


def crop(sample: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return half of ``sample`` and one byte more, from a random start: the inputs and, shifted by one, the targets."""
    context = len(sample) // 2
    start = int(torch.randint(0, context, (), generator=generator))
    return sample[start : start + context + 1]


class Block(nn.Module):
    """Causal self-attention and a feed-forward part, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(_ATTENTION):
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        fed: torch.Tensor = self.drop(self.feed(self.norm2(x)))
        return x + fed


class ByteTransformer(nn.Module):
    """The model: bytes (batch, length), of any integer dtype, to logits (batch, length, 256) of each next byte. It embeds each
    byte, its place and hashes of the last 2, 3 and 4 bytes (Pagnoni et al. 2024, arXiv 2412.09871, section 3.2.1)."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float, grams: int) -> None:
        super().__init__()
        self.rows = grams
        self.bytes = nn.Embedding(_VOCABULARY, width)
        self.grams = nn.Embedding(grams * (_LONGEST_GRAM - 1), width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in (block.out, block.feed[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        x = x.long()
        hidden = self.bytes(x) + self.places.weight[:length] + self.grams(self._hashes(x)).sum(0)
        logits: torch.Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits

    def _hashes(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``grams`` for the last 2, 3 and 4 bytes at each position of ``x``: (lengths, batch, length)."""
        before = functional.pad(x, (_LONGEST_GRAM - 1, 0))  # NUL, the separator between files
        code, rows = x, []
        for k in range(1, _LONGEST_GRAM):
            code = code * _VOCABULARY + before[:, _LONGEST_GRAM - 1 - k :][:, : x.shape[1]]
            rows.append((code * _KNUTH >> 16) % self.rows + (k - 1) * self.rows)
        return torch.stack(rows)


class ByteLMTask:
    """The task ``bytelm``. Arguments: ``steps``; ``batch_size`` (per rank, or of the whole group with ``batch_is="global"``);
    ``context`` in bytes; ``width``, ``layers``, ``heads``, ``grams``, ``dropout`` of the model; peak ``lr``, ``warmup`` steps,
    ``weight_decay``, ``clip`` (largest norm of the gradient); ``train_bytes`` and ``held_back_bytes`` (caps); ``num_workers``;
    ``evaluate_every`` in steps (None: at the end). Raises ``UserError`` for impossible ``steps``, model or caps.

    Metrics: ``loss`` (nats per byte) and ``bits_per_byte`` of the training batches; ``test_bits_per_byte`` of the held-back
    bytes.
    """

    def __init__(
        self,
        steps: int = 600,
        batch_size: int = 16,
        context: int = 64,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        grams: int = 4096,
        dropout: float = 0.0,
        lr: float = 4e-3,
        warmup: int = 40,
        weight_decay: float = 0.05,
        clip: float = 1.0,
        train_bytes: int = 2_000_000,
        held_back_bytes: int = 200_000,
        num_workers: int = 0,
        batch_is: BatchIs = "per_rank",
        evaluate_every: int | None = None,
    ) -> None:
        if min(steps, context, width, layers, heads, grams, train_bytes, held_back_bytes) < 1 or width % heads:
            raise UserError(
                "bytelm: steps, context, width, layers, heads, grams, train_bytes and held_back_bytes are at least 1, and heads "
                "divides width"
            )
        self.steps, self.batch_size, self.batch_is, self.context = steps, batch_size, batch_is, context
        self.width, self.layers, self.heads, self.grams, self.dropout = width, layers, heads, grams, dropout
        self.lr, self.warmup, self.weight_decay, self.clip = lr, warmup, weight_decay, clip
        self.train_bytes, self.held_back_bytes = train_bytes, held_back_bytes
        self.num_workers, self.evaluate_every = num_workers, evaluate_every
        self._held_back = torch.empty(0, dtype=torch.uint8)
        self._rank, self._world_size = 0, 1

    def build(self, ctx: TaskContext) -> Parts:
        """Build the model, AdamW, a schedule with warm-up, and the training data."""
        corpus = load_corpus(self.train_bytes, self.held_back_bytes)
        loader = TrainLoader(
            Windows(torch.from_numpy(corpus.train.copy()), self.context, corpus.digest),
            batch_size=self.batch_size,
            batch_is=self.batch_is,
            seed=ctx.seed,
            rank=ctx.rank,
            world_size=ctx.world_size,
            num_workers=self.num_workers,
            augment=crop,
        )
        self._held_back = torch.from_numpy(corpus.held_back.copy())
        self._rank, self._world_size = ctx.rank, ctx.world_size
        model = self._model().to(ctx.device)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.98))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return Parts(
            model,
            optimizer,
            loader,
            total_steps=self.steps,
            scheduler=scheduler,
            evaluate_every=self.evaluate_every,
            digest=loader.data_digest(),
        )

    def _model(self) -> ByteTransformer:
        return ByteTransformer(self.width, self.layers, self.heads, self.context, self.dropout, self.grams)

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """The parameter shapes of the model that ``build`` makes, without allocating its memory."""
        with torch.device("meta"):
            return [tuple(p.shape) for p in self._model().parameters()]

    def _rate(self, step: int) -> float:
        """The learning rate after ``step`` steps, relative to the peak: a linear warm-up, then a cosine to 5 %."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

    def _windows(self) -> list[torch.Tensor]:
        """Return this rank's windows of the held-back bytes, of ``context + 1`` bytes each (the last may be shorter)."""
        # Not kept in an attribute: each save would look at all of them.
        starts = range(0, len(self._held_back) - 1, self.context)
        mine = shard(len(starts), self._rank, self._world_size)
        return [self._held_back[starts[i] : starts[i] + self.context + 1] for i in mine]

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Clip the gradient's norm to ``clip``."""
        nn.utils.clip_grad_norm_(model.parameters(), self.clip)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> LossResult:
        """Return the loss of a batch of windows in nats per byte, and ``bits_per_byte`` as a metric."""
        loss = _nats(model, batch, "mean")
        return loss, {"bits_per_byte": loss.detach() / math.log(2)}

    def evaluation(self) -> Iterator[Any]:
        """Yield this rank's held-back windows in batches of up to 64; a shorter window is a batch of its own."""
        windows = self._windows()
        full = [w for w in windows if len(w) == self.context + 1]
        for n in range(0, len(full), 64):
            yield torch.stack(full[n : n + 64])
        yield from (w.unsqueeze(0) for w in windows if len(w) < self.context + 1)

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Sums:
        """Return the sum of the bits of all target bytes in the batch, and their number."""
        weight = batch.shape[0] * (batch.shape[1] - 1)
        return {"test_bits_per_byte": (float(_nats(model, batch, "sum")) / math.log(2), float(weight))}


def _nats(model: nn.Module, windows: torch.Tensor, reduction: str) -> torch.Tensor:
    """The cross-entropy in nats of each byte of ``windows`` (batch, length) except the first, reduced by ``reduction``."""
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten().long(), reduction=reduction)
