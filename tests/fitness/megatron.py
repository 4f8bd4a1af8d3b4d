"""A registered model on the Megatron target: assembled on the meta device everywhere, and loaded for real at TP2.

Both take entries of the registry, so that they can be shown to fail. The groups are fake: rank 0's own, which never communicate;
`stage` and `chunk` say what is built.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from mm_models.config.model import ModelConfig
from mm_models.layout import Coords, ModelSplit, ParallelLayout
from mm_models.weights.boxes import partition_fault
from mm_models.weights.model_map import LocalTensor, WeightMap, build
from tests.fitness.registered import Entries, layouts, register, splits

LENGTH = 32


def assembly_case(rank: int, content: str, wide: bool, entries: Entries) -> dict:
    """Faults of one model on the topologies it claims, and which degrees those have."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mm_models.device import prepare
    from mm_models.mcore.assembly import init_parallel

    prepare()
    dist.destroy_process_group()
    # Core also makes groups of gloo, which asks the other ranks.
    parallel_state.initialize_model_parallel = partial(
        parallel_state.initialize_model_parallel, create_gloo_process_groups=False
    )
    register(entries)
    model = ModelConfig.model_validate_json(content)
    wmap, faults, seen = build(model), [], []
    for layout in layouts(model, wide=wide):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world)
        for lists in splits(model, layout):
            split = model.split(layout, **lists)
            init_parallel(layout, split)
            where = f"{layout.flags()}, {split.describe()}"
            held = _held(wmap, layout, split)
            faults += [f"{where}: {fault}" for fault in _chunk_faults(model, held, layout, split)]
            faults += [f"{where}: {fault}" for fault in _partition_faults(wmap, held)]
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        seen.append(layout)
    degrees = {name: sorted({getattr(one, name) for one in seen}) for name in ("tp", "pp", "vpp", "ep")}
    return {"faults": faults, "degrees": degrees}


def _held(wmap: WeightMap, layout: ParallelLayout, split: ModelSplit) -> dict[Coords, dict[str, LocalTensor]]:
    """What the map gives every rank. Ranks that differ in their data-parallel place alone are copies and stand here once."""
    every = {(at.tp, at.etp, at.ep, at.pp): at for at in map(layout.coords, range(layout.world))}
    return {at: wmap.local(at, layout, split) for at in every.values()}


def _chunk_faults(model: ModelConfig, held: dict, layout: ParallelLayout, split: ModelSplit) -> Iterator[str]:
    """Names and shapes of every chunk on the meta device against what the map gives each rank of its stage."""
    from mm_models.mcore.assembly import build_chunk, named_tensors

    for stage, chunk in itertools.product(range(layout.pp), range(layout.vpp)):
        built = build_chunk(model, layout, split, stage=stage, chunk=chunk, dtype=torch.bfloat16, device="meta")
        have = {name: tuple(tensor.shape) for name, tensor in named_tensors([built]).items()}
        for at, local in held.items():
            if at.pp != stage:
                continue
            want = {name: one.shape for name, one in local.items() if one.chunk == chunk}
            for name in sorted(have.keys() | want.keys()):
                if have.get(name) != want.get(name):
                    yield f"{at}, chunk {chunk}: {name} is {have.get(name)} in the model, {want.get(name)} in the map"


def _partition_faults(wmap: WeightMap, held: dict) -> Iterator[str]:
    """Whether the ranks hold every element of every tensor once, copies apart: of one coordinate a tensor is cut along."""
    boxes: dict[str, dict] = {}
    for at, local in held.items():
        for name, one in local.items():
            place = tuple(getattr(at, split.axis) for split in one.tensor.shard)
            boxes.setdefault(name, {})[place] = [(region.start, region.extent) for region in one.regions]
    for name, tensor in wmap.tensors.items():
        if name not in boxes:
            if not tensor.alias:
                yield f"{name}: on no rank"
        elif fault := partition_fault(tensor.shape, [box for parts in boxes[name].values() for box in parts]):
            yield f"{name}: {fault}"


def forward_case(rank: int, family: str, content: str, folder: str, entries: Entries) -> float:
    """The largest relative error of this rank's logits against Hugging Face's, weights loaded from `folder` through the map."""
    from mm_models.device import prepare
    from mm_models.mcore.assembly import build_chunk, init_parallel, named_tensors
    from mm_models.weights.live import load_into
    from tests.mcore.batches import batch, hf_inputs
    from tests.models import tiny_model

    prepare()
    register(entries)
    model = ModelConfig.model_validate_json(content)
    layout = ParallelLayout.for_world(dist.get_world_size(), tp=dist.get_world_size(), sequence_parallel=True)
    split = model.split(layout)
    init_parallel(layout, split, timeout_minutes=1)
    chunk = build_chunk(model, layout, split)
    load_into(named_tensors([chunk]), folder, model=model, layout=layout, coords=layout.coords(rank), split=split)
    data = batch(3, images=[[(4, 6), (2, 8)]], length=LENGTH)
    with torch.no_grad():
        expected = tiny_model(family, 0)(**hf_inputs(data)).logits.chunk(layout.tp, -1)[rank].transpose(0, 1)
        got = chunk({key: value for key, value in data.items() if key != "labels"})
    return ((got - expected).abs().max() / expected.abs().max()).item()
