"""The sections of model.json: what every vision encoder, projector and decoder says, whatever its `model_id`.

A component's own keys are a subclass in `converters/<family>/`, registered in table `sections` under its `model_id`s and
found by `by_model_id` when a file is read. Sizes follow the field's names (`num_query_groups` are key-value heads,
`kv_channels` is the head dimension, `ffn_hidden_size` the MLP's inner width).

Files of the field also have keys that change nothing here: `WITHOUT_EFFECT` of a class says which, and which values of
them. Those are dropped, and listed by `dropped_keys`; any other value of them asks for something else and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from mm_models.config.strict import StrictModel
from mm_models.registry import table

Size = Annotated[int, Field(gt=0)]
Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Strict all the same: JSON may write 10000 for 10000.0, but neither "1e4" nor true."""
LayerCounts = list[int] | list[list[int]] | None
Freeze = bool | list[str] | None

FREEZE_DEFAULTS = {"vision_encoder": True, "vision_projector": False, "text_decoder": False}
"""What `freeze` means when it is absent, as in the field."""

Allowed = tuple[Any, ...] | Callable[[Mapping[str, Any]], tuple[Any, ...]]
ANY: Allowed = ()
"""Every value: nothing reads the key."""


def same_as(key: str) -> Allowed:
    """The value of another key of the section, which it must repeat."""
    return lambda section: (section.get(key),)


# Fusions change no result; data types and recompute are flags of the run; dropout is not computed.
COMMON: Mapping[str, Allowed] = {
    "hidden_dropout": (0,),
    "attention_dropout": (0,),
    "fp16": (False,),
    "bf16": ANY,
    "params_dtype": ("bf16", "fp32"),
    "use_fused_rotary_pos_emb": ANY,
    "bias_activation_fusion": ANY,
    "recompute_granularity": ANY,
    "recompute_method": ANY,
    "recompute_num_layers": ANY,
    "context_parallel_size": (1,),
    "canonical_model": (False,),
}


class Section(StrictModel):
    """What the three kinds of section share. `DEFAULTS` are keys that a family's files leave out, and what that means."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, Allowed]] = COMMON
    DEFAULTS: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {}

    model_id: str
    freeze: Freeze = None
    init_method_std: Number = 0.02

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept = dict(data)
        for key in cls.dropped(data):
            allowed = cls.WITHOUT_EFFECT[key]
            values = allowed(data) if callable(allowed) else allowed
            if values and data[key] not in values:
                raise ValueError(
                    f"{key} is {data[key]!r}; model_id {data.get('model_id')!r} knows only {' or '.join(map(repr, values))}"
                )
            del kept[key]
        for key, default in cls.DEFAULTS.items():
            if kept.get(key) is None and (value := default(kept)) is not None:
                kept[key] = value
        return kept

    @classmethod
    def dropped(cls, data: Mapping[str, Any]) -> list[str]:
        """The keys of a section that have no effect here."""
        return [key for key in data if key in cls.WITHOUT_EFFECT and key not in cls.model_fields]

    @classmethod
    def schema_of(cls, data: Any) -> type[Section]:
        """The schema of a section of this kind by its `model_id`; the kind itself where that says nothing."""
        model_id = data.get("model_id") if isinstance(data, Mapping) else None
        if not isinstance(model_id, str):
            return cls
        schema = table("sections").get(model_id)
        if not issubclass(schema, cls):
            raise ValueError(f"model_id {model_id!r} is not a {_kind(cls)} but a {_kind(schema)}")
        return schema


class VisionEncoderConfig(Section):
    """A vision transformer: patches in, one state per patch or per merged token out."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, Allowed]] = COMMON | {
        "hidden_act": same_as("activation_func"),
        "llm_hidden_size": ANY,
        "attention_mask_type": ("general",),
        "use_vit_dp": (False,),
    }
    MERGES: ClassVar[bool]
    """Whether the tower itself merges patches, or leaves it to the projector."""

    num_layers: Size
    pipeline_num_layers: LayerCounts = None
    hidden_size: Size
    num_attention_heads: Size
    ffn_hidden_size: Size
    patch_size: Size = 14
    temporal_patch_size: Size = 2
    spatial_merge_size: Size = 2
    in_channels: Size = 3
    rope_theta: Number = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_features(self) -> int:
        """Width of one row of `pixel_values`."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def eps(self) -> float:
        """Of the norms in the blocks."""
        raise NotImplementedError

    @property
    def gated(self) -> bool:
        """Whether the MLPs have a gate beside the up projection."""
        raise NotImplementedError

    @property
    def merging_products(self) -> int:
        """Multiply-adds a patch of the product that merges patches, where the tower has one."""
        return 0

    def segments(self, layer: int, grid: tuple[int, int, int]) -> list[int]:
        """Lengths of the stretches of patches that attend to each other in `layer`, for one image of (t, h, w) patches."""
        return [grid[1] * grid[2]] * grid[0]

    @model_validator(mode="after")
    def _check_heads(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide by num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 4:
            raise ValueError(f"head dimension {self.head_dim} must be a multiple of 4 for the 2-D rotary embedding")
        return self


class VisionProjectorConfig(Section):
    """The merger between vision tower and decoder."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, Allowed]] = COMMON | {"num_layers": (1,)}

    @property
    def out_features(self) -> int:
        """Width of a feature handed to the decoder."""
        raise NotImplementedError

    @property
    def products(self) -> int:
        """Multiply-adds of one merged token."""
        raise NotImplementedError

    @property
    def split_widths(self) -> dict[str, int]:
        """Widths that are split over TP, by key; a small projector is replicated."""
        return {}

    def check_encoder(self, encoder: VisionEncoderConfig) -> None:
        """ValueError unless this projector takes what `encoder` gives."""
        raise NotImplementedError


class TextDecoderConfig(Section):
    """A decoder. Every layer is dense, unless the family's own keys say otherwise."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, Allowed]] = COMMON | {
        "hidden_act": same_as("activation_func"),
        "num_key_value_heads": same_as("num_query_groups"),
        "group_query_attention": (True,),
        "disable_bias_linear": (True,),
        "attention_softmax_in_fp32": (True,),
        "parallel_output": (True,),
        "rope_scaling": (None,),
        "use_remove_padding": (False,),
        "seq_length": ANY,
    }

    num_layers: Size
    pipeline_num_layers: LayerCounts = None
    hidden_size: Size
    ffn_hidden_size: Size
    num_attention_heads: Size
    num_query_groups: Size
    kv_channels: Size
    vocab_size: Size
    max_position_embeddings: Size
    rope_theta: Number
    partial_rotary_factor: Number = 1.0
    mrope_section: list[int]
    position_embedding_type: Literal["mrope"] = "mrope"
    normalization: Literal["RMSNorm"] = "RMSNorm"
    activation_func: Literal["silu"] = "silu"
    gated_linear_unit: Literal[True] = True
    add_bias_linear: Literal[False] = False
    add_qkv_bias: bool
    untie_embeddings_and_output_weights: bool
    num_moe_experts: None = None

    @property
    def eps(self) -> float:
        """Of every norm."""
        raise NotImplementedError

    @property
    def rotary_dim(self) -> int:
        """How many leading dimensions of a head are rotated."""
        return int(self.kv_channels * self.partial_rotary_factor)

    @property
    def rotary_interleaved(self) -> bool:
        """Whether neighbouring dimensions are rotated as pairs, rather than one half against the other."""
        return False

    def is_moe(self, layer: int) -> bool:
        """Whether global layer `layer` is a mixture-of-experts layer."""
        return False

    def split_widths(self) -> list[tuple[str, int, str]]:
        """(what, size, parallel axis) of the widths of its own that must divide."""
        return []

    @model_validator(mode="after")
    def _check_heads(self):
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} does not divide by num_query_groups {self.num_query_groups}"
            )
        if 2 * sum(self.mrope_section) != self.rotary_dim:
            raise ValueError(
                f"mrope_section {self.mrope_section} sums to {sum(self.mrope_section)}, expected half the rotary dimension, "
                f"kv_channels {self.kv_channels} x partial_rotary_factor {self.partial_rotary_factor} / 2 = {self.rotary_dim / 2:g}"
            )
        return self


def head_dim(section: Mapping[str, Any]) -> int | None:
    """hidden_size / num_attention_heads, as a default of `kv_channels`; None where that is no whole number."""
    hidden, heads = section.get("hidden_size"), section.get("num_attention_heads")
    return (
        hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads and not hidden % heads else None
    )


def _kind(schema: type) -> str:
    kinds = {
        VisionEncoderConfig: "vision_encoder",
        VisionProjectorConfig: "vision_projector",
        TextDecoderConfig: "text_decoder",
    }
    return next(name for kind, name in kinds.items() if issubclass(schema, kind))


def by_model_id(kind: type[Section]) -> Any:
    """The annotation of a section of `kind`: validated and written by the schema of its `model_id`."""

    def read(data: Any) -> Any:
        return kind.schema_of(data).model_validate(data) if isinstance(data, Mapping) else data

    return Annotated[SerializeAsAny[kind], BeforeValidator(read)]


def dropped_keys(content: Any) -> dict[str, list[str]]:
    """Section of a model.json's content -> its keys without effect here."""
    images = content.get("image_encoder") or {}
    sections = {
        "vision_encoder": (VisionEncoderConfig, images.get("vision_encoder")),
        "vision_projector": (VisionProjectorConfig, images.get("vision_projector")),
        "text_decoder": (TextDecoderConfig, content.get("text_decoder")),
    }
    return {
        name: dropped
        for name, (kind, data) in sections.items()
        if isinstance(data, Mapping) and (dropped := kind.schema_of(data).dropped(data))
    }
