"""The text decoder of the Megatron target: embedding, the layers one stage holds, final norm and head.

Hidden states (S / tp, B, H) travel between stages. The first text stage holds the embedding and places the image features.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import nn

from mm_models.components.attention import causal_padding_mask
from mm_models.components.loss import IGNORE, shift_labels, summed_cross_entropy
from mm_models.components.multimodal import place_features
from mm_models.components.rotary import inverse_frequencies, mrope_cos_sin
from mm_models.config.sections import TextDecoderConfig
from mm_models.layout import Stage
from mm_models.mcore.layers import AttentionContext
from mm_models.mcore.parallel import ColumnParallelLinear, VocabParallelEmbedding


class Embedding(nn.Module):
    """`word_embeddings`, split over the vocabulary."""

    def __init__(self, *, config: TransformerConfig, vocab: int, hidden: int):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(vocab, hidden, config=config)


class TextDecoder(nn.Module):
    """What one stage holds of a decoder. `tie_here`: the head is the embedding of this same module."""

    def __init__(
        self, *, config: TransformerConfig, text: TextDecoderConfig, block: ModuleSpec, stage: Stage, tie_here: bool
    ):
        super().__init__()
        self.stage, self.sequence_parallel = stage, config.sequence_parallel
        self.sections, self.interleaved = list(text.mrope_section), text.rotary_interleaved
        self.inv_freq = inverse_frequencies(text.rotary_dim, text.rope_theta)  # no buffer: nothing can cast or drop it
        self.dtype = config.params_dtype
        if stage.first:
            self.embedding = Embedding(config=config, vocab=text.vocab_size, hidden=text.hidden_size)
        self.decoder = build_module(block, config=config)
        if stage.last:
            head = ColumnParallelLinear(
                text.hidden_size, text.vocab_size, config=config, bias=False, sequence_parallel=config.sequence_parallel
            )
            if tie_here:
                head.weight = self.embedding.word_embeddings.weight
            self.output_layer = head

    def embed(self, input_ids: torch.Tensor, features: torch.Tensor | None, image_token_id: int | None) -> torch.Tensor:
        """(B, S) ids and features (n, 1, H) or None -> (S / tp, B, H)."""
        x = self.embedding.word_embeddings(input_ids)
        if features is not None:
            x = place_features(x, features.squeeze(1), input_ids, image_token_id)
        x = x.transpose(0, 1).contiguous()
        return scatter_to_sequence_parallel_region(x) if self.sequence_parallel else x

    def forward(self, x: torch.Tensor, batch: dict) -> torch.Tensor:
        """(S / tp, B, H) -> the same; on the last stage logits (S, B, V / tp), or the summed loss where the batch has labels."""
        if len(self.decoder.layers):
            inv_freq = self.inv_freq.to(x.device)
            cos, sin = mrope_cos_sin(
                batch["position_ids"], inv_freq, self.sections, self.dtype, interleaved=self.interleaved
            )
            context = AttentionContext(
                rotary=(cos.transpose(0, 1), sin.transpose(0, 1)), mask=causal_padding_mask(batch.get("attention_mask"))
            )
            x = self.decoder(x, context)
        if not self.stage.last:
            return x
        logits = self.output_layer(self.decoder.finish(x))
        return logits if batch.get("labels") is None else self._loss(logits, batch["labels"])

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of cross entropies over the labelled tokens, fp32."""
        shifted = shift_labels(labels)
        if parallel_state.get_tensor_model_parallel_world_size() == 1:
            return summed_cross_entropy(logits.transpose(0, 1), shifted)  # (B, S, V): Hugging Face's order of rows
        shifted = shifted.T.contiguous()  # (S, B): core views the logits flat, so they stay as they lie
        kept = shifted != IGNORE
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits.float(), shifted.masked_fill(~kept, 0))
        return torch.where(kept, losses, 0.0).sum()
