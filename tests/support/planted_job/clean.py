"""Public models, small and with random weights, in which nothing is planted: each must train and resume exactly under strict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.utils.data import Dataset
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from training import Training

WORDS, LENGTH, SAMPLES = 50, 12, 32
SMALL: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32, "max_position_embeddings": 64}
FEW: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
FEW |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 1}
IMAGES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IMAGES |= {"image_size": 16, "patch_size": 4, "num_labels": 3}


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: column[number] for name, column in self.columns.items()}


class _Clean(Training):
    """A model that takes the columns of ``columns`` and gives a loss."""

    def __init__(self, way: str) -> None:
        super().__init__(way)

    def columns(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def samples(self) -> Dataset[Any]:
        return Rows(self.columns(torch.Generator().manual_seed(5)))

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-3)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return hf.get_cosine_schedule_with_warmup(optimizer, 3, 14)

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    def evaluation(self) -> Iterator[Any]:
        rows = self.samples()
        for number in range(3):
            if number == 1:
                self.fault.in_evaluation()
            yield torch.utils.data.default_collate([rows[number], rows[number + 1]])

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[float, float]]:
        return {"loss": (float(self.value(model, batch)), 1.0)}


class _Text(_Clean):
    def columns(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


class _Images(_Clean):
    side = 16

    def columns(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        pixels = torch.randn(SAMPLES, 3, self.side, self.side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 3, (SAMPLES,), generator=generator)}


class GPT2(_Text):
    def net(self) -> nn.Module:
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=64))


class BERT(_Text):
    def net(self) -> nn.Module:
        return hf.BertForMaskedLM(hf.BertConfig(**SMALL))


class RoBERTa(_Text):
    def net(self) -> nn.Module:
        return hf.RobertaForMaskedLM(hf.RobertaConfig(**SMALL))


class DistilBERT(_Text):
    def net(self) -> nn.Module:
        return hf.DistilBertForMaskedLM(
            hf.DistilBertConfig(vocab_size=WORDS, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
        )


class ALBERT(_Text):
    def net(self) -> nn.Module:
        return hf.AlbertForMaskedLM(hf.AlbertConfig(**SMALL, embedding_size=8))


class ELECTRA(_Text):
    def net(self) -> nn.Module:
        return hf.ElectraForMaskedLM(hf.ElectraConfig(**SMALL, embedding_size=8))


class DeBERTa(_Text):
    def net(self) -> nn.Module:
        return hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**SMALL, relative_attention=True, position_buckets=8))


class T5(_Text):
    def net(self) -> nn.Module:
        config = hf.T5Config(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        config.decoder_start_token_id = 0
        return hf.T5ForConditionalGeneration(config)


class BART(_Text):
    def net(self) -> nn.Module:
        return hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=WORDS, max_position_embeddings=64, **FEW))


class Llama(_Text):
    def net(self) -> nn.Module:
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1))


class Mistral(_Text):
    def net(self) -> nn.Module:
        return hf.MistralForCausalLM(hf.MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=4))


class Mixtral(_Text):
    def net(self) -> nn.Module:
        config = hf.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=3, output_router_logits=True)
        return hf.MixtralForCausalLM(config)


class Qwen2(_Text):
    def net(self) -> nn.Module:
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL, num_key_value_heads=1))


class Gemma(_Text):
    def net(self) -> nn.Module:
        return hf.GemmaForCausalLM(hf.GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=8))


class OPT(_Text):
    def net(self) -> nn.Module:
        config = hf.OPTConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            word_embed_proj_dim=16,
        )
        return hf.OPTForCausalLM(config)


class GPTNeoX(_Text):
    def net(self) -> nn.Module:
        return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL))


class Phi(_Text):
    def net(self) -> nn.Module:
        return hf.PhiForCausalLM(hf.PhiConfig(**SMALL))


class Mamba(_Text):
    def net(self) -> nn.Module:
        return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, state_size=4))


class ViT(_Images):
    def net(self) -> nn.Module:
        return hf.ViTForImageClassification(hf.ViTConfig(**IMAGES))


class ConvNext(_Images):
    side = 32

    def net(self) -> nn.Module:
        config = hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3, drop_path_rate=0.2)
        return hf.ConvNextForImageClassification(config)


class ResNet(_Images):
    """With batch norm."""

    def net(self) -> nn.Module:
        config = hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
        )
        return hf.ResNetForImageClassification(config)


class Swin(_Images):
    def net(self) -> nn.Module:
        config = hf.SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4, num_labels=3
        )
        return hf.SwinForImageClassification(config)


class SegFormer(_Images):
    side = 32

    def net(self) -> nn.Module:
        config = hf.SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2],
            num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
        )  # fmt: skip
        return hf.SegformerForImageClassification(config)


class CLIP(_Clean):
    def columns(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
        return {"input_ids": words, "pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=generator)}

    def net(self) -> nn.Module:
        return hf.CLIPModel(hf.CLIPConfig(text_config=SMALL, vision_config=IMAGES, projection_dim=8))

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch, return_loss=True).loss
        return loss


class Whisper(_Clean):
    def columns(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
        return {"input_features": torch.randn(SAMPLES, 8, 40, generator=generator), "labels": words}

    def net(self) -> nn.Module:
        config = hf.WhisperConfig(
            vocab_size=WORDS, num_mel_bins=8, max_source_positions=20, max_target_positions=20, pad_token_id=0, **FEW
        )
        return hf.WhisperForConditionalGeneration(config)


class Wav2Vec2(_Clean):
    """With masks drawn from numpy, and layers left out."""

    def columns(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        labels = torch.randint(1, WORDS, (SAMPLES, 3), generator=generator)
        return {"input_values": torch.randn(SAMPLES, 800, generator=generator), "labels": labels}

    def net(self) -> nn.Module:
        small = {k: v for k, v in SMALL.items() if k != "max_position_embeddings"}
        config = hf.Wav2Vec2Config(
            **small, conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=4, layerdrop=0.3,
            num_conv_pos_embedding_groups=2, mask_time_prob=0.3, mask_time_length=2, ctc_zero_infinity=True,
        )  # fmt: skip
        return hf.Wav2Vec2ForCTC(config)


class Measured(nn.Module):
    """torch's own parts, and torchmetrics that are reset now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(WORDS, 16), nn.LSTM(16, 16, 2, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 3)
        self.metrics = MetricCollection({"accuracy": MulticlassAccuracy(3)})
        self.distance = MeanSquaredError()

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.encoder(self.embedding(words)))
        scores = self.head(hidden[:, -1])
        self.metrics.update(scores, labels)
        self.distance.update(scores.argmax(1).float().detach(), labels.float())
        if not self.training:
            self.metrics.compute()
            self.metrics.reset()
        return nn.functional.cross_entropy(scores, labels)


class TorchMetrics(_Clean):
    def columns(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
        return {"words": words, "labels": torch.randint(0, 3, (SAMPLES,), generator=generator)}

    def net(self) -> nn.Module:
        return Measured()

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)
        return loss
