"""What the field cases share: folders with fingerprints, a model loaded from a folder as training loads it, runs read off by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from mm_models.components.moe import Router
from mm_models.device import prepare
from mm_models.layout import ParallelLayout
from mm_models.mcore.assembly import build_chunks, init_parallel, named_tensors
from mm_models.weights import live
from tests.mcore.batches import batch, hf_inputs
from tests.mcore.oracle import megatron_tensors
from tests.mcore.test_bit_equal import concatenated
from tests.weights.folders import edit_state, hf_folder, model_config, resplit

QUIET_TIMEOUT = 60
EXPERT = "text_decoder.decoder.layers.{}.mlp.experts."


def hf_model(folder: Path):
    """Hugging Face's own model of a folder, fp32, in eval mode, with the arithmetic everything is compared with."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model = kind.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    if model_config(folder).text.num_moe_experts:
        model.set_experts_implementation("grouped_mm")
    return model.eval()


def numbered_experts(folder: Path, **overrides) -> Path:
    """fp32, per expert: every matrix of expert e is filled with e + 1, the norm of text layer i with i + 1."""
    hf_folder(folder, dtype=torch.float32, **overrides)

    def fill(state):
        for name, tensor in state.items():
            if ".experts." in name:
                tensor.fill_(int(name.split(".experts.")[1].split(".")[0]) + 1)
            elif name.startswith("model.language_model.layers") and name.endswith(".input_layernorm.weight"):
                tensor.fill_(int(name.split(".")[3]) + 1)

    edit_state(folder, fill)
    return folder


def load(source: Path, hf: Path, *, split: dict | None = None, **degrees):
    """(chunks, layout) of this rank, filled from `source` as a run fills them; the model is that of `hf`'s config."""
    prepare()
    model = model_config(hf)
    layout = ParallelLayout.for_world(dist.get_world_size(), **degrees)
    stages = model.split(layout, **(split or {}))
    init_parallel(layout, stages, timeout_minutes=1)
    chunks = build_chunks(model, layout, stages)
    coords = layout.coords(dist.get_rank())
    live.load_into(named_tensors(chunks), source, model=model, layout=layout, coords=coords, split=stages)
    return chunks, layout


def logits(chunks: list, batches: list[dict], layout: ParallelLayout) -> list[torch.Tensor]:
    """Logits (S, B, V / tp) of this rank's micro-batches, on the last stage, through core's schedule."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def forward_step(iterator, chunk):
        return chunk({k: v for k, v in next(iterator).items() if k != "labels"}), lambda x, non_loss_data: x

    with torch.no_grad():
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if layout.vpp > 1 else iter(batches),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What one rank saw: worst relative error of its logits (None off the last stage), chosen experts, constants it holds by name."""

    worst: float | None
    chosen: frozenset[tuple[int, ...]]
    constants: dict[str, list[float]]


def loaded_case(rank: int, source: Path, hf: Path, split: dict, degrees: dict) -> Loaded:
    """Load `source` on this rank, run four micro-batches, compare with Hugging Face's model of `hf`.

    `constants`: for each tensor of experts and each input norm of the decoder the value every row is filled with (NaN where a
    row is not constant).
    """
    chunks, layout = load(source, hf, split=split, **degrees)
    chosen: set[tuple[int, ...]] = set()

    def note(module, inputs, output):
        chosen.update(tuple(sorted(row)) for row in output[1].tolist())

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Router):
                module.register_forward_hook(note)
    everything = [batch(20 + i, images=[[(4, 4 + 2 * (i % 2))]], length=40) for i in range(4)]
    at = layout.coords(rank)
    mine = everything[at.dp :: layout.dp]
    worst = None
    if got := logits(chunks, mine, layout):
        reference = hf_model(hf)
        with torch.no_grad():
            for place, one in enumerate(got):
                group = everything[place * layout.dp : (place + 1) * layout.dp] if layout.ep > 1 else [mine[place]]
                expected = reference(**hf_inputs(concatenated(group))).logits
                expected = (
                    (expected[at.dp : at.dp + 1] if layout.ep > 1 else expected)
                    .chunk(layout.tp, -1)[at.tp]
                    .transpose(0, 1)
                )
                worst = max(worst or 0.0, ((one - expected).abs().max() / expected.abs().max()).item())
    return Loaded(worst=worst, chosen=frozenset(chosen), constants=_constants(chunks))


def _constants(chunks: list) -> dict[str, list[float]]:
    found = {}
    for name, tensor in named_tensors(chunks).items():
        if ".experts." in name or (name.startswith("text") and name.endswith("input_layernorm.weight")):
            rows = tensor.detach().flatten(1) if ".experts." in name else tensor.detach()[None]
            found[name] = [row[0].item() if (row == row[0]).all() else float("nan") for row in rows]
    return found


@cache
def _gradients(hf: Path, made: tuple) -> tuple[dict[str, torch.Tensor], float]:
    from tests.mcore.batches import hf_sum_loss

    model, total = hf_model(hf), 0.0
    for provider, ids, divisor in made:
        _, loss = hf_sum_loss(model, provider.micro_batch(list(ids)))
        (loss / divisor).backward()
        total += loss.item() / divisor
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return megatron_tensors(grads, model_config(hf)), total


def gradients(
    hf: Path, provider, window: list[tuple[int, ...]], divisors: list[float]
) -> tuple[dict[str, torch.Tensor], float]:
    """Hugging Face's gradients by Megatron's names, and the loss: the sum over micro-batches of sum of CE / divisor."""
    return _gradients(hf, tuple((provider, ids, divisor) for ids, divisor in zip(window, divisors, strict=True)))


def stepped(folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """The gradient that the first step of a run was taken with, whole tensors by name: its first moment over 1 - beta1."""
    one = resplit(folder, scratch)
    content = torch.load(one / "iter_0000001" / "mp_rank_00" / "optim_dp000.pt", weights_only=True)["params"]
    return {name: entry["exp_avg"].view(torch.Size(entry["shape"])) * 10 for name, entry in content.items()}


def ratios(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Per tensor <got, expected> / <expected, expected>; tensors whose gradient is rounding alone are left out."""
    norm = torch.cat([g.flatten().double() for g in expected.values()]).norm()
    found = {}
    for name, value in got.items():
        g = expected[name].double()
        if g.norm() > 1e-6 * norm:
            found[name] = ((value.double() * g).sum() / (g * g).sum()).item()
    return found


def agree(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    """Every tensor equal within `tolerance` of its own norm (or a millionth of the whole gradient's)."""
    norm = torch.cat([g.flatten().double() for g in expected.values()]).norm()
    bad = {}
    for name, value in got.items():
        error = (
            (value.double() - expected[name].double()).norm() / max(expected[name].double().norm(), 1e-6 * norm)
        ).item()
        if not error <= tolerance:
            bad[name] = error
    assert not bad, sorted(bad.items(), key=lambda item: -item[1])[:8]
