"""`build_loader`: the same samples for any DP size, worker count and stopping point; the processor fits the model."""

from __future__ import annotations

import itertools
import json
import multiprocessing

import pytest
import torch

from mm_models.data.loader import build_loader
from mm_models.data.processor import load_processor
from mm_models.errors import UserError
from mm_models.registry import load_plugins
from tests import harness
from tests.data import kit


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """23 numbered rows, every third with an image."""
    base = tmp_path_factory.mktemp("numbered")
    rows = []
    for index in range(23):
        images = [kit.picture(base / f"{index}.png", 60 + index, 40, index).name] if index % 3 == 0 else []
        rows.append(kit.row("<image>" * len(images) + f"number {index}", "n" * (index + 1), images=images))
    kit.data_config(base, base, rows)
    return base


@pytest.fixture(scope="module")
def load(folder, processor, base):
    def build(config=None, model=None, **options):
        config = config or kit.data_config(folder, base, **options.pop("data", {}))
        defaults = {"model_config": model or kit.model_config(processor), "global_batch_size": 4}
        return build_loader(config, **defaults | options)

    return build


def sample_ids(loader, count):
    return [batch["sample_ids"] for batch in itertools.islice(loader, count)]


def test_ranks_share_out_the_same_steps(load):
    whole = sample_ids(load(), 48)
    for dp in (2, 4):
        ranks = [sample_ids(load(dp_rank=rank, dp_size=dp), 48 // dp) for rank in range(dp)]
        assert [found for step in zip(*ranks, strict=True) for found in step] == whole


def test_model_parallel_peers_get_the_same_ids(load):
    first = sample_ids(load(needs=frozenset({"ids", "grid", "pixels"})), 24)
    assert sample_ids(load(needs=frozenset({"labels"})), 24) == first


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_do_not_depend_on_workers(load, workers):
    plain = list(itertools.islice(load(micro_batch_size=2), 14))
    found = list(itertools.islice(load(micro_batch_size=2, data={"num_workers": workers}), 14))
    for left, right in zip(plain, found, strict=True):
        assert left.keys() == right.keys() and left["sample_ids"] == right["sample_ids"]
        assert all(torch.equal(left[key], right[key]) for key in left if key != "sample_ids")


@pytest.mark.parametrize("stop", [3, 9])
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_resume_in_mid_epoch(load, stop, before, after):
    """B40: five steps an epoch; what workers had prefetched is neither skipped nor repeated, and DP and the number of
    workers may change."""
    whole = sample_ids(load(), 48)
    ranks = [sample_ids(load(dp_rank=rank, dp_size=2, data={"num_workers": before}), 2 * stop) for rank in range(2)]
    first = [found for step in zip(*ranks, strict=True) for found in step]
    rest = load(micro_batch_size=2, consumed_samples=4 * stop, data={"num_workers": after})
    assert first + [[id] for micro in sample_ids(rest, 24 - 2 * stop) for id in micro] == whole
    assert len({id for (id,) in whole[:20]}) == 20


def test_weights_set_how_often_a_file_comes(load, base):
    (base / "more.jsonl").write_text(json.dumps(kit.row("q", "a")) + "\n")
    data = {"dataset": [str(base / "train.json"), str(base / "more.jsonl")], "dataset_weights": [1.0, 5.0]}
    found = [id for micro in sample_ids(load(data=data), 28) for id in micro]
    assert found.count(23) == 5 and len(set(found)) == 24


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_examined_when_drawn_give_the_same_batches(load, workers):
    plain = list(itertools.islice(load(micro_batch_size=2), 4))
    data = {"preprocess_on_fly": True, "num_workers": workers}
    for left, right in zip(plain, itertools.islice(load(micro_batch_size=2, data=data), 4), strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left if key != "sample_ids")


PLUGIN = """
from mm_models.data.collator import VisionLanguageCollator
from mm_models.data.templates.glm4v_moe import Glm4vMoeTemplate
from mm_models.registry import table

class Mine(Glm4vMoeTemplate):
    pass

class MyCollator(VisionLanguageCollator):
    def __call__(self, samples):
        return super().__call__(samples) | {"mark": "mine"}

table("templates").add("mine", "mine:Mine")
table("collators").add("mine", "mine:MyCollator")
"""


def _load_with_plugin(rank, plugin, folder, base):
    multiprocessing.current_process()._config["daemon"] = False  # a daemon may not start workers
    load_plugins([str(plugin)])
    config = kit.data_config(
        folder,
        base,
        [kit.row("q", "a"), kit.row("r", "b")],
        template="mine",
        streaming=True,
        collator_id="mine",
        num_workers=1,
    )
    return next(iter(build_loader(config, model_config=kit.model_config(load_processor(folder)))))["mark"]


def test_a_worker_has_the_plugins_of_the_run(folder, tmp_path):
    """Template and collator of a file: the collator's class must be there before the collator is."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN)
    assert harness.run(_load_with_plugin, 1, plugin, folder, tmp_path) == ["mine"]


def test_options_of_an_accelerator_change_nothing_without_one(load):
    data = {"pin_memory": True, "enable_preload": True}
    assert sample_ids(load(data=data), 24) == sample_ids(load(), 24)
    assert "data enable_preload has no effect without an accelerator" in load(data=data).lines()
    assert not any("enable_preload" in line for line in load().lines())


@pytest.mark.parametrize("workers", [0, 2])
class TestFaults:
    """What goes wrong while samples are prepared names file and row, from a worker too."""

    def load(self, folder, processor, tmp_path, workers, **data):
        rows = [kit.row("<image>", "a", images=[kit.picture(tmp_path / f"{k}.png", seed=k).name]) for k in range(4)]
        config = kit.data_config(folder, tmp_path, rows, num_workers=workers, shuffle=False, **data)
        return build_loader(config, model_config=kit.model_config(processor), global_batch_size=1)

    def test_an_image_that_went_away(self, folder, processor, tmp_path, workers):
        loader = self.load(folder, processor, tmp_path, workers)
        (tmp_path / "2.png").unlink()
        batches = iter(loader)
        assert [next(batches)["sample_ids"] for _ in range(2)] == [[0], [1]]
        with pytest.raises(UserError, match=rf"^{tmp_path}/train.json: row 2, image '{tmp_path}/2.png': no such file"):
            next(batches)

    def test_an_error_of_our_own(self, folder, processor, tmp_path, workers):
        loader = self.load(folder, processor, tmp_path, workers)
        loader.collator._pixels._table = None
        with pytest.raises(RuntimeError, match="preparing rows 0 failed"):
            next(iter(loader))


def test_a_killed_worker_names_the_setting(load):
    batches = iter(load(data={"num_workers": 1}))
    next(batches)
    for process in multiprocessing.active_children():
        if "Loader" in process.name or process.name.startswith("ForkServerProcess"):
            process.kill()
    with pytest.raises(UserError, match=r"of the loader died .*lower dataloader_param.num_workers \(now 1\)"):
        sample_ids(batches, 40)


def test_the_training_s_random_state_is_left_alone(load):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sample_ids(load(), 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_both_collator_ids_give_glm_positions(load, processor):
    from mm_models.data.positions import mrope

    for data in (
        {"collator_id": "glm4v_moe"},
        {"collator_id": "qwen3vl"},
        {"model_name": "qwen3vl"},
    ):
        batch = next(iter(load(micro_batch_size=4, data=data)))
        expected = mrope(
            batch["input_ids"],
            batch["attention_mask"],
            batch["image_grid_thw"],
            image_token_id=processor.image_token_id,
            spatial_merge_size=2,
        )
        assert torch.equal(batch["position_ids"], expected)


def test_length_and_lines(load):
    loader = load(dp_size=2)
    assert len(loader) == 10
    text = "\n".join(loader.lines())
    assert "23 of 23 rows" in text and "784 to 12544 pixels" in text and "3 samples are left out" in text


class TestRefused:
    def test_an_unknown_template_or_collator(self, load):
        with pytest.raises(
            UserError, match=r"unknown dataset_param.basic_parameters.template 'glm4v_mo'; did you mean 'glm4v_moe'"
        ):
            load(data={"template": "glm4v_mo"})
        with pytest.raises(
            UserError, match=r"unknown dataloader_param.collate_param.collator_id 'qwen3v'; did you mean 'qwen3vl'"
        ):
            load(data={"collator_id": "qwen3v"})

    def test_a_processor_of_another_model(self, load, processor):
        model = kit.model_config(processor).model_copy(update={"img_context_token_id": 5})
        with pytest.raises(UserError, match="model img_context_token_id 5, processor image token id 510"):
            load(model=model)
        with pytest.raises(UserError, match="vocab_size 400, the tokenizer has 512 tokens"):
            load(model=kit.model_config(processor, vocab_size=400))

    def test_images_for_a_model_without_an_encoder(self, load, processor):
        with pytest.raises(UserError, match="holds 8 images, the model has no image_encoder"):
            load(model=kit.model_config(processor).model_copy(update={"image_encoder": None}))

    def test_too_few_samples(self, load):
        with pytest.raises(UserError, match="23 samples are fewer than one global batch of 24"):
            load(global_batch_size=24)

    def test_a_decoder_without_positions(self, load, processor):
        model = kit.model_config(processor)
        decoder = model.text_decoder.model_copy(update={"model_id": "mine"})
        with pytest.raises(UserError, match="unknown id 'mine' in table 'positions'"):
            load(model=model.model_copy(update={"text_decoder": decoder}))
