"""data.json: the names of the field, and a named refusal for everything else (field case B69)."""

from __future__ import annotations

import json

import pytest

from mm_models.config.data import load_data_config
from mm_models.errors import UserError
from tests.data import kit

PUBLISHED = {
    "dataset_param": {
        "dataset_type": "huggingface",
        "attr": {
            "images": "images",
            "messages": "messages",
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
        "preprocess_parameters": {
            "model_name_or_path": "./ckpt/hf_path/GLM-4.5V",
            "trust_remote_code": True,
            "use_fast_tokenizer": True,
            "split_special_tokens": False,
            "image_max_pixels": 262144,
            "image_min_pixels": 1024,
            "video_max_pixels": 16384,
            "video_min_pixels": 0,
            "video_fps": 2.0,
            "video_maxlen": 64,
        },
        "basic_parameters": {
            "cutoff_len": 1024,
            "template": "glm4v_moe",
            "train_on_prompt": False,
            "mask_history": False,
            "dataset_dir": "./data",
            "dataset": "./data/mllm_format_llava_instruct_data.json",
            "cache_dir": "./data/cache_dir",
            "overwrite_cache": False,
            "preprocessing_batch_size": 1000,
            "preprocessing_num_workers": 16,
            "max_samples": None,
        },
    },
    "dataloader_param": {
        "pin_memory": True,
        "shuffle": True,
        "dataloader_mode": "sampler",
        "drop_last": True,
        "sampler_type": "BaseRandomBatchSampler",
        "num_workers": 8,
        "collate_param": {"collator_id": "qwen3vl", "ignore_pad_token_for_loss": True},
        "enable_preload": True,
    },
}
"""The data section published with GLM-4.5V for FSDP2, as JSON."""

BASIC = "dataset_param.basic_parameters"
PREPROCESS = "dataset_param.preprocess_parameters"
LOADER = "dataloader_param"


def changed(path, *, drop=None, **values):
    value = json.loads(json.dumps(PUBLISHED))
    section = value
    for key in path.split(".") if path else ():
        section = section[key]
    section |= values
    if drop:
        del section[drop]
    return value


def load(tmp_path, value):
    (tmp_path / "data.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return load_data_config(tmp_path / "data.json")


def test_the_published_section_is_read_as_it_is(tmp_path):
    config = load(tmp_path, PUBLISHED)
    assert config.dataset_param.basic_parameters.cutoff_len == 1024
    assert config.dataset_param.preprocess_parameters.image_max_pixels == 262144
    assert config.dataloader_param.collate_param.collator == "qwen3vl"


def test_the_example_is_read():
    assert load_data_config(kit.QUICKSTART / "data.json").dataloader_param.collate_param.collator == "glm4v_moe"


def test_model_name_is_the_older_name_of_collator_id(tmp_path):
    value = changed(f"{LOADER}.collate_param", drop="collator_id", model_name="qwen3vl")
    assert load(tmp_path, value).dataloader_param.collate_param.collator == "qwen3vl"


def test_the_megatron_section_published_with_qwen_is_read(tmp_path):
    """Its template and collator, its nulls, and an image bound of zero; what it leaves out has its default."""
    tools = {"observation_tag": None, "function_tag": None, "system_tag": None, "system": None, "videos": None}
    value = changed(f"{LOADER}.collate_param", drop="collator_id", model_name="qwen2vl")
    dataset = value["dataset_param"]
    dataset["attr"] |= tools
    dataset["preprocess_parameters"] |= {
        "model_name_or_path": "./ckpt/hf_path/Qwen2.5-VL-7B-Instruct",
        "image_min_pixels": 0,
    }
    dataset["basic_parameters"] |= {"template": "qwen2vl", "tool_format": None}
    for section, key in (
        ("preprocess_parameters", "trust_remote_code"),
        ("basic_parameters", "cutoff_len"),
        ("basic_parameters", "overwrite_cache"),
    ):
        del dataset[section][key]
    del value["dataloader_param"]["num_workers"], value["dataloader_param"]["enable_preload"]
    config = load(tmp_path, value)
    assert config.dataloader_param.collate_param.collator == "qwen2vl"
    assert config.dataset_param.basic_parameters.cutoff_len == 1024
    assert config.dataset_param.attr.system_tag is None


REFUSED = {
    "typo": (changed(BASIC, cutof_len=5), "cutof_len.*did you mean 'cutoff_len'"),
    "dash": (changed(BASIC, **{"mask-history": True}), "mask-history.*did you mean 'mask_history'"),
    "case": (changed(LOADER, Shuffle=True), "Shuffle.*did you mean 'shuffle'"),
    "wrong section": (changed(LOADER, template="x"), "template.*belongs at 'dataset_param.basic_parameters.template'"),
    "text for a boolean": (changed(LOADER, shuffle="true"), "dataloader_param.shuffle.*boolean.*'true'"),
    "null for a number": (changed(BASIC, cutoff_len=None), "cutoff_len.*integer.*None"),
    "number as text": (changed(PREPROCESS, image_max_pixels="262144"), "image_max_pixels.*'262144'"),
    "zero": (changed(BASIC, cutoff_len=0), "cutoff_len.*greater than 0"),
    "missing": (changed(BASIC, drop="template"), "basic_parameters.template: Field required"),
    "bounds": (changed(PREPROCESS, image_min_pixels=300000), "image_min_pixels 300000 exceeds image_max_pixels 262144"),
    "both collator names": (changed(f"{LOADER}.collate_param", model_name="qwen3vl"), "both given, give exactly one"),
    "no collator": (changed(f"{LOADER}.collate_param", drop="collator_id"), "neither given, give exactly one"),
    "sampler": (changed(LOADER, sampler_type="LengthGroupedSampler"), "sampler_type.*'BaseRandomBatchSampler'"),
    "sequential": (changed(LOADER, sampler_type="SequentialBatchSampler"), "does not shuffle; set shuffle to false"),
    "both masks": (changed(BASIC, train_on_prompt=True, mask_history=True), "contradict each other"),
    "cutoff": (changed(BASIC, cutoff="tokens"), "cutoff.*'turns' or 'drop'.*got 'tokens'"),
    "broken images": (changed(BASIC, on_broken_image="skip"), "on_broken_image.*'refuse' or 'drop'"),
    "workers": (changed(BASIC, preprocessing_num_workers=-1), "preprocessing_num_workers.*greater than or equal to 0"),
    "share": (changed(BASIC, val_rate=1.0), "val_rate.*less than 1"),
    "two validation sets": (changed(BASIC, val_rate=0.5, val_dataset="v.json"), "val_dataset and val_rate both name"),
    "weights": (changed(BASIC, dataset="a.json,b.json", dataset_weights=[1.0]), "got 1 weights for 2 files"),
    "no file": (changed(BASIC, dataset=","), "dataset names no file"),
    "empty file": (changed(BASIC, dataset=""), "basic_parameters.dataset: String should have at least 1 character"),
    "files of two kinds": (changed(BASIC, dataset=["a", 3]), "basic_parameters.dataset.1: Input should be a valid str"),
    "later: tail": (changed(LOADER, drop_last=False), "drop_last: not supported yet"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_file_and_key(tmp_path, case):
    value, message = REFUSED[case]
    with pytest.raises(UserError, match=f"data.json: .*{message}"):
        load(tmp_path, value)


def test_a_key_given_twice(tmp_path):
    text = json.dumps(PUBLISHED).replace('"cutoff_len": 1024', '"cutoff_len": 1024, "cutoff_len": 2048')
    with pytest.raises(UserError, match="key 'cutoff_len' is given twice"):
        load(tmp_path, text)
