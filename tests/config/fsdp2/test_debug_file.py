"""glm4_5v_debug.yaml is the published file on one process: the paths, sizes and lengths differ, and nothing else."""

from __future__ import annotations

from mm_models.config.fsdp2 import RunConfig, load_config
from mm_models.config.strict import dotted_keys
from tests.config.fsdp2.kit import SEED

DEBUG = SEED.with_name("glm4_5v_debug.yaml")
SIZES = (
    "parallel.fully_shard_parallel_size",
    "parallel.expert_parallel_size",
    "parallel.ring_attention_size",
    "parallel.ulysses_parallel_size",
)
BASIC, PREPROCESS = "data.dataset_param.basic_parameters", "data.dataset_param.preprocess_parameters"
DIFFER = {
    *SIZES[:2],
    f"{PREPROCESS}.model_name_or_path",
    f"{PREPROCESS}.image_max_pixels",
    f"{PREPROCESS}.image_min_pixels",
    f"{BASIC}.cutoff_len",
    f"{BASIC}.dataset_dir",
    f"{BASIC}.dataset",
    "data.dataloader_param.num_workers",
    "model.model_name_or_path",
    "features.chunkloss_plan.chunk_size",
    "training.lr",
    "training.train_iters",
    "training.load",
    "training.save",
    "training.save_interval",
}


def value(config: RunConfig, key: str):
    for name in key.split("."):
        config = getattr(config, name)
    return config


def test_it_differs_where_one_process_needs_it():
    """E21: the four sizes are 1, both plans are left in."""
    published, debug = load_config(SEED), load_config(DEBUG)
    sections = {key.rpartition(".")[0] for key in dotted_keys(RunConfig)}
    leaves = [key for key in dotted_keys(RunConfig) if key not in sections]
    assert {key for key in leaves if value(published, key) != value(debug, key)} == DIFFER
    assert [value(debug, key) for key in SIZES] == [1, 1, 1, 1]
    assert debug.parallel.ep_plan.apply_modules and debug.parallel.fsdp_plan.apply_modules
    assert debug.training.load == debug.model.model_name_or_path
