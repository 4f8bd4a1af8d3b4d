"""Layers over stages and samples over ranks: no layer lost or moved, two splits never mixed, text-only micro-batches anywhere."""

from __future__ import annotations

import json

import pytest
import torch

from mm_models.cli.convert import main
from mm_models.cli.models import main as models
from mm_models.errors import UserError
from mm_models.mcore.arguments import parse
from mm_models.mcore.checkpoint import check_source
from mm_models.mcore.layers import Recompute
from mm_models.mcore.validation import plan
from tests.field.kit import numbered_experts
from tests.field.test_conversion import computed
from tests.harness import run
from tests.mcore.test_topologies import check, kwargs_case
from tests.mcore.test_training import DISTRIBUTED, SP, topology
from tests.mcore.training_kit import Synthetic, launch_synthetic, tiny_flags
from tests.weights.folders import edit_config, hf_folder, loaded, model_config, resplit, state_of, to_hf, to_mm

# --- B23 ------------------------------------------------------------------------------------------------------------

LISTS = [
    # pp, list of the decoder (5 layers) or of the ViT (2 layers), words
    (2, "text", [2, 2], "sum 4, model 5"),
    (2, "text", [3, 3], "sum 6, model 5"),
    (1, "text", [3], "sum 3, model 5"),
    (2, "text", [5], "of length 1, expected 2"),
    (2, "text", [2, 2, 1], "of length 3, expected 2"),
    (2, "text", [6, -1], "expected non-negative integers"),
    (2, "text", [2.5, 2.5], "2.5"),
    (2, "vision", [1, 0], "sum 1, model 2"),
    (2, "vision", [2, 1], "sum 3, model 2"),
    (1, "vision", [1], "sum 1, model 2"),
    (2, "vision", [2], "of length 1, expected 2"),
    (2, "vision", [3, -1], "expected non-negative integers"),
]


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("field") / "five", num_hidden_layers=5)


@pytest.mark.parametrize(("pp", "part", "value", "words"), LISTS, ids=str)
def test_lists_that_do_not_fit_are_refused_everywhere(five, tmp_path, capsys, pp, part, value, words):
    """B23: by the converter (flag and model.json), by `init` and by the trainer, with the same numbers; the same rules for the ViT."""
    flag = {"text": "--llm-pp-layers", "vision": "--vit-pp-layers"}[part]
    given = [f"{flag}={json.dumps(value)}", "--pp", str(pp)]
    assert main(["hf_to_mm", "--hf", str(five), "--out", str(tmp_path / "mm"), *given]) == 2
    said = [capsys.readouterr().err]
    assert models(["init", "--hf", str(five), "-o", str(tmp_path / "m.json"), *given]) == 2
    said.append(capsys.readouterr().err)
    argv = [*tiny_flags(tmp_path, *topology(pp=pp)), "--from-scratch"]
    content = model_config(five).model_dump(mode="json", exclude_none=True)
    place = content["text_decoder"] if part == "text" else content["image_encoder"]["vision_encoder"]
    place["pipeline_num_layers"] = value
    (tmp_path / "model.json").write_text(json.dumps(content))
    assert (
        main(
            [
                "hf_to_mm",
                "--hf",
                str(five),
                "--out",
                str(tmp_path / "mm"),
                "--model",
                str(tmp_path / "model.json"),
                "--pp",
                str(pp),
            ]
        )
        == 2
    )
    said.append(capsys.readouterr().err)
    with pytest.raises(UserError) as caught:
        plan(parse(argv), pp)
    said.append(str(caught.value))
    assert all(words in text for text in said), said
    assert not (tmp_path / "mm").exists() and not (tmp_path / "m.json").exists()


@pytest.mark.parametrize("value", ["[2,3]", "2,3", {"0": 2, "1": 3}, 5, [[2, 3]], [2, 3]], ids=str)
def test_only_a_list_is_a_list(five, tmp_path, value):
    """B23: text, an object or a number in model.json are refused by key; a list and a list of one list are the same."""
    argv = [*tiny_flags(tmp_path, *topology(pp=2)), "--from-scratch"]
    content = model_config(five).model_dump(mode="json", exclude_none=True)
    content["text_decoder"]["pipeline_num_layers"] = value
    (tmp_path / "model.json").write_text(json.dumps(content))
    if isinstance(value, list):
        assert plan(parse(argv), 2).split.text.flat == (2, 3)
        return
    with pytest.raises(UserError, match=r"text_decoder\.pipeline_num_layers"):
        plan(parse(argv), 2)


def test_a_stage_count_above_the_layers_keeps_them_all(five, tmp_path):
    """B23: five layers on 2, 3, 4 and 8 stages, no list given: five layers in the files each time."""
    for pp in (2, 3, 4, 8):
        files = loaded(to_mm(five, tmp_path / str(pp), pp=pp)).values()
        assert (
            sum(
                name.startswith("text") and name.endswith("input_layernorm.weight")
                for tensors in files
                for name in tensors
            )
            == 5
        )
        assert (
            sum(
                name.startswith("image") and name.endswith("input_layernorm.weight")
                for tensors in files
                for name in tensors
            )
            == 2
        )


# --- B24, B25 -------------------------------------------------------------------------------------------------------

NORM = "text_decoder.decoder.layers.{}.input_layernorm.weight"


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return numbered_experts(tmp_path_factory.mktemp("field") / "eight", num_hidden_layers=8)


SPLITS = {
    # name: (processes, degrees, split, layers of the decoder by rank)
    "pp2·vpp2": (2, {"pp": 2, "vpp": 2}, {}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    "pp2·vpp2, uneven": (
        2,
        {"pp": 2, "vpp": 2},
        {"vision": [[1, 1], [0, 0]], "text": [[0, 3], [1, 4]]},
        [[3], [0, 1, 2, 4, 5, 6, 7]],
    ),
    "pp2, vision [2,0], text [1,7]": (2, {"pp": 2}, {"vision": [2, 0], "text": [1, 7]}, [[0], [1, 2, 3, 4, 5, 6, 7]]),
    "pp2, vision late": (2, {"pp": 2}, {"vision": [0, 2], "text": [0, 8]}, [[], [0, 1, 2, 3, 4, 5, 6, 7]]),
    "pp2, head only": (2, {"pp": 2}, {"vision": [2, 0], "text": [8, 0]}, [[0, 1, 2, 3, 4, 5, 6, 7], []]),
    "pp4, vision first": (
        4,
        {"pp": 4},
        {"vision": [2, 0, 0, 0], "text": [0, 2, 4, 2]},
        [[], [0, 1], [2, 3, 4, 5], [6, 7]],
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_every_layer_is_loaded_where_it_belongs(eight, tmp_path, name):
    """B24, B25: after conversion with that split layer i's norm holds i + 1 in the live model; logits are Hugging Face's."""
    nprocs, degrees, split, expected = SPLITS[name]
    mm = to_mm(eight, tmp_path / "mm", **degrees, **split)
    named = {f"{part}_layers": rows for part, rows in split.items()}
    results = computed(eight, mm, nprocs, degrees, named)
    for result, layers in zip(results, expected, strict=True):
        held = {name: value for name, value in result.constants.items() if ".experts." not in name}
        assert held == {NORM.format(i): [float(i + 1)] for i in layers}
    one = resplit(resplit(mm, tmp_path / "four", pp=4), tmp_path / "one")
    assert [loaded(one)["mp_rank_00", 0][NORM.format(i)][0].item() for i in range(8)] == [
        float(i + 1) for i in range(8)
    ]
    back, state = state_of(to_hf(one, eight, tmp_path / "back")), state_of(eight)
    assert all((back[key] == state[key]).all() for key in state)


@pytest.mark.parametrize(
    ("vpp", "value", "words"),
    [
        (2, [4, 4], "expected 2: one per virtual chunk"),
        (2, [[2, 2], [2, 1]], "sum 7, model 8"),
        (2, [[2, 2], [4]], "of length 1, expected 2"),
        (2, [[4, 4], [2, 2], [-2, -2]], "non-negative"),
        (1, [[2, 2], [2, 2]], "expected 1: one per virtual chunk"),
        (2, [2, 2, 4], "expected 2: one per virtual chunk"),
    ],
    ids=str,
)
def test_lists_that_do_not_fit_the_chunks(eight, tmp_path, vpp, value, words):
    """B25: neither truncated nor spread anew."""
    with pytest.raises(UserError, match=words):
        to_mm(eight, tmp_path / "mm", pp=2, vpp=vpp, text=value)


def refused(argv: list[str], world: int) -> str:
    with pytest.raises(UserError) as caught:
        check_source(plan(parse(argv), world))
    return str(caught.value)


def test_a_converted_folder_and_a_run_that_disagree(tmp_path):
    """B24: converted with ViT [2,0] and LLM [0,4]: the same is accepted; another decoder or ViT list is refused with both
    lists, and so are swapped tp and pp, before a process starts."""
    hf = hf_folder(tmp_path / "hf")
    mm = to_mm(hf, tmp_path / "mm", pp=2, vision=[2, 0], text=[0, 4])

    def flags(vision, text, *more: str) -> list[str]:
        sections = {"vision_encoder": {"pipeline_num_layers": vision}, "text_decoder": {"pipeline_num_layers": text}}
        return [*tiny_flags(tmp_path, *more, "--bf16", **sections), "--load", str(mm)]

    assert check_source(plan(parse(flags([2, 0], [0, 4], *topology(pp=2))), 2)).checkpoint is not None
    message = refused(flags([2, 0], [1, 3], *topology(pp=2)), 2)
    assert "[[0, 4]] there" in message and "[[1, 3]] here" in message and "mm-convert resplit" in message
    message = refused(flags([1, 1], [0, 4], *topology(pp=2)), 2)
    assert (
        "vision [[2, 0]], text [[0, 4]] there" in message
        and "vision [[1, 1]], text [[0, 4]] here" in message
        and "--vit-pp-layers '[[1, 1]]'" in message
    )
    message = refused(flags([2], [4], *topology(tp=2), SP), 2)
    assert "tp 1 there, 2 here" in message and "pp 2 there, 1 here" in message and "--tp 2" in message
    both = to_mm(hf, tmp_path / "both", tp=2, pp=4)
    argv = [*tiny_flags(tmp_path, *topology(tp=4, pp=2), SP, text_decoder={"num_query_groups": 4}), "--load", str(both)]
    message = refused(argv, 8)
    assert "tp 2 there, 4 here" in message and "pp 4 there, 2 here" in message


@pytest.mark.parametrize("source", ["same", "hf"])
def test_a_run_from_a_converted_folder_starts_where_hugging_face_does(tmp_path, source):
    """B24: the first loss at PP 2 with uneven lists, from a converted folder or Hugging Face's, is that of one process."""
    hf = hf_folder(tmp_path / "hf", dtype=torch.float32)
    mm = to_mm(hf, tmp_path / "mm", pp=2, vision=[1, 1], text=[0, 4])
    lists = {"vision_encoder": {"pipeline_num_layers": [1, 1]}, "text_decoder": {"pipeline_num_layers": [0, 4]}}
    argv = tiny_flags(tmp_path, *topology(pp=2), "--load", str(mm if source == "same" else hf), steps=1, **lists)
    (got,) = launch_synthetic(2, argv, tmp_path / "a.jsonl")
    (want,) = launch_synthetic(1, tiny_flags(tmp_path / "one", "--load", str(hf), steps=1), tmp_path / "b.jsonl")
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6) and got["grad_norm"] == pytest.approx(
        want["grad_norm"], rel=1e-4
    )


def test_a_folder_with_fewer_layers_than_its_config(tmp_path):
    """B23: config.json promises six layers, the files hold five."""
    path = hf_folder(tmp_path / "hf", num_hidden_layers=5)
    edit_config(path, lambda config: config["text_config"].update(num_hidden_layers=6))
    with pytest.raises(UserError, match=r"missing: .*layers\.5\."):
        to_mm(path, tmp_path / "mm")


# --- B07 ------------------------------------------------------------------------------------------------------------

FROZEN = {"image_encoder__vision_encoder__freeze": True, "image_encoder__vision_projector__freeze": True}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("count", "texts", "recompute"),
    [(2, (0,), None), (2, (1,), "full"), (2, (0, 1), None), (4, (0, 1), "full"), (4, (2, 3), None)],
    ids=str,
)
def test_one_rank_has_text_the_other_an_image(count, texts, recompute, frozen):
    """B07: DP 2, accumulation 1 and 2, the text sample in either slot, all text, ViT trained and frozen, with recompute:
    ends, and the gradients are those of one process on the same samples."""
    more = {"texts": texts, "extra": FROZEN if frozen else {}, "recompute": Recompute(granularity=recompute)}
    check(run(kwargs_case, 2, count, {}, {}, more, timeout=60))


@pytest.mark.parametrize(
    "flags", [[], [DISTRIBUTED], topology(ep=2), topology(pp=2)], ids=["dp2", "dp2 sharded", "ep2", "pp2"]
)
def test_steps_of_images_then_of_text_then_mixed(tmp_path, flags):
    """B07: only the last step is mixed, after one of images and one of text alone: every step's numbers as on one process."""
    order = (1, 2, 3, 6, 4, 9)  # multiples of 3 have no image
    argv = tiny_flags(tmp_path, "--from-scratch", steps=3, batch=2)
    expected = launch_synthetic(1, argv, tmp_path / "a.jsonl", Synthetic(order=order))
    got = launch_synthetic(2, [*argv, *flags], tmp_path / "b.jsonl", Synthetic(order=order))
    for one, other in zip(got, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5) and one["grad_norm"] == pytest.approx(
            other["grad_norm"], rel=1e-4
        )
        assert one["labelled_tokens"] == other["labelled_tokens"]
