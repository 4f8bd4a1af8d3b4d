"""Experts over ranks: each rank its own, gradients of the right size, one norm on all ranks, layouts refused by arithmetic."""

from __future__ import annotations

import json

import pytest
import torch

from mm_models.cli.convert import main
from mm_models.cli.models import main as models
from mm_models.errors import UserError
from mm_models.mcore.arguments import parse
from mm_models.mcore.validation import plan
from mm_models.weights.check import compare
from mm_models.weights.manifest import open_checkpoint
from tests.field.kit import EXPERT, gradients, loaded_case, ratios, stepped
from tests.harness import CaseFailed, run
from tests.mcore.test_training import DISTRIBUTED, SP, topology
from tests.mcore.training_kit import Synthetic, launch_synthetic, tiny_flags, train_synthetic
from tests.weights.folders import edit_config, hf_folder, resplit, state_of, to_hf, to_mm

# --- B36, B05 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ep", "source"), [(2, "hf"), (2, "same"), (4, "ep1"), (4, "same")])
def test_live_ranks_hold_their_own_experts(numbered, tmp_path, source, ep):
    """B36, B05: what the model's own parameters hold after loading a Hugging Face folder or a checkpoint of EP 1 or of this EP."""
    folder = numbered if source == "hf" else to_mm(numbered, tmp_path / "mm", ep=1 if source == "ep1" else ep)
    results = run(loaded_case, ep, folder, numbered, {}, {"ep": ep}, timeout=60)
    for rank, result in enumerate(results):
        wanted = [float(e + 1) for e in range(rank * 8 // ep, (rank + 1) * 8 // ep)]
        for layer in (1, 2, 3):
            for kind in ("gate_up_proj", "down_proj"):
                assert result.constants[EXPERT.format(layer) + kind] == wanted
        assert result.worst <= 1e-5


def test_every_way_between_expert_layouts_ends_at_the_same_bytes(numbered, tmp_path):
    """B36: ep1 → ep2 → ep4 → ep1, and each of them straight from Hugging Face."""
    straight = {ep: to_mm(numbered, tmp_path / f"straight{ep}", ep=ep) for ep in (1, 2, 4)}
    mm = straight[1]
    for step, ep in enumerate((2, 4, 1)):
        mm = resplit(mm, tmp_path / f"step{step}", ep=ep)
        files = sorted(file.relative_to(mm) for file in mm.glob("release/*/*.pt"))
        assert files == sorted(file.relative_to(straight[ep]) for file in straight[ep].glob("release/*/*.pt"))
        assert all((mm / file).read_bytes() == (straight[ep] / file).read_bytes() for file in files)


@pytest.mark.parametrize(
    ("nprocs", "flags", "dtype"),
    [
        (4, [*topology(tp=2, ep=2, etp=1, pp=2), SP], torch.float32),
        (4, [*topology(ep=2), DISTRIBUTED], torch.bfloat16),
        (2, topology(pp=2, vpp=2), torch.float32),
    ],
    ids=["tp2·ep2·pp2", "ep2·dp2 bf16", "pp2·vpp2"],
)
def test_a_run_that_changes_nothing_saves_what_it_loaded(tmp_path, nprocs, flags, dtype):
    """B05, B36: load a Hugging Face folder, step at a learning rate too small to change a bit, save, export: the same
    bytes; every trained tensor has its moments, and nothing else has."""
    hf = hf_folder(tmp_path / "hf", dtype=dtype)
    bf16 = ["--bf16"] if dtype == torch.bfloat16 else []
    argv = tiny_flags(
        tmp_path, *flags, *bf16, "--load", str(hf), "--save", str(tmp_path / "ck"), "--lr", "1e-30", steps=1
    )
    at = argv.index("--lr")
    del argv[at : at + 2]
    launch_synthetic(nprocs, argv, tmp_path / "m.jsonl")
    assert compare(hf, tmp_path / "ck").equal
    back, state = state_of(to_hf(tmp_path / "ck", hf, tmp_path / "back")), state_of(hf)
    assert set(back) == set(state) and all(
        torch.equal(back[name], state[name]) and back[name].dtype == state[name].dtype for name in state
    )
    moments = {moment.name for moment in open_checkpoint(tmp_path / "ck").manifest.optimizer}
    assert moments == {
        e.name
        for e in open_checkpoint(tmp_path / "ck").manifest.tensors
        if not e.name.endswith("e_score_correction_bias")
    }


# --- B21, B22 -------------------------------------------------------------------------------------------------------

ORDER = (1, 2, 4, 3, 5, 7, 6, 8)
"""Eight samples of one step; 3 and 6 have no image."""
SPREAD = {
    "ep1·dp4": [],
    "ep4": [*topology(ep=4), DISTRIBUTED],
    "ep2·dp2": [*topology(ep=2), DISTRIBUTED],
    "tp2·ep2·dp2": [*topology(tp=2, etp=1, ep=2), SP],
}


def norms_case(rank: int, argv: list[str], provider: Synthetic) -> list[float]:
    """Train; the gradient norm of each step as this rank knows it."""
    from mm_models.mcore import training

    plain, norms = training.train_step, []

    def train_step(*args, **how):
        result = plain(*args, **how)
        norms.append(result.grad_norm)
        return result

    training.train_step = train_step
    train_synthetic(rank, argv, provider)
    return norms


@pytest.fixture(scope="module")
def whole(hf):
    """Hugging Face's gradient of the eight samples, one sample a micro-batch, and its norm without frozen parts."""
    provider = Synthetic(order=ORDER)
    counts = [int((provider.micro_batch([id])["labels"][:, 1:] != -100).sum()) for id in ORDER]
    expected, _ = gradients(hf, provider, [(id,) for id in ORDER], [count * len(ORDER) for count in counts])
    return expected


def norm_of(grads: dict[str, torch.Tensor], *without: str) -> float:
    return (
        torch.cat([g.flatten().double() for name, g in grads.items() if not name.startswith(without or ("-",))])
        .norm()
        .item()
    )


def step_of(hf, tmp_path, *extra: str, nprocs: int = 4, **sections):
    """(norm of the gradient, the same on every rank; gradients as the optimizer took them) of one step of eight samples."""
    argv = tiny_flags(tmp_path, "--load", str(hf), "--save", str(tmp_path / "ck"), *extra, steps=1, batch=8, **sections)
    norms = {norm for (norm,) in run(norms_case, nprocs, argv, Synthetic(order=ORDER), timeout=60)}
    assert len(norms) == 1
    return norms.pop(), stepped(tmp_path / "ck", tmp_path / "one")


@pytest.mark.parametrize("spread", SPREAD)
def test_gradients_have_the_size_of_one_process(hf, whole, tmp_path, spread):
    """B21, B22: two or more micro-batches a rank, clipping off: each tensor's gradient is 1.000 ± 1e-4 of Hugging Face's,
    and the norm on every rank is that of the whole."""
    norm, got = step_of(hf, tmp_path, *SPREAD[spread], "--clip-grad", "0")
    assert norm == pytest.approx(norm_of(whole), rel=1e-4)
    assert set(got) == {name for name in whole if not name.endswith("e_score_correction_bias")}
    bad = {name: ratio for name, ratio in ratios(got, whole).items() if not abs(ratio - 1) <= 1e-4}
    assert not bad, bad


@pytest.mark.parametrize(
    ("nprocs", "limit", "flags"),
    [(2, "0.1", topology(ep=2)), (4, "0.1", [*topology(tp=2, pp=2), SP]), (2, "1e9", topology(pp=2))],
    ids=["ep2", "tp2·pp2", "large"],
)
def test_clipping_is_one_factor(hf, whole, tmp_path, nprocs, limit, flags):
    """B22: after a clip at 0.1 the norm is 0.1 and every tensor has been scaled by the same factor; at 1e9 nothing is touched."""
    norm, got = step_of(hf, tmp_path, *flags, "--clip-grad", limit, nprocs=nprocs)
    assert norm == pytest.approx(norm_of(whole), rel=1e-4)
    factor = min(1.0, float(limit) / norm_of(whole))
    assert norm_of(got) == pytest.approx(factor * norm_of(whole), rel=1e-4)
    assert all(ratio == pytest.approx(factor, rel=1e-4) for ratio in ratios(got, whole).values())


def test_frozen_parts_do_not_count(hf, whole, tmp_path):
    """B22: a frozen vision tower is in neither norm nor clip."""
    flags = [*topology(ep=2), DISTRIBUTED, "--clip-grad", "0.1"]
    norm, got = step_of(hf, tmp_path, *flags, nprocs=2, vision_encoder={"freeze": True})
    expected = norm_of(whole, "image_encoder.encoder.")
    assert norm == pytest.approx(expected, rel=1e-4) and expected < 0.999 * norm_of(whole)
    assert norm_of(got) == pytest.approx(0.1, rel=1e-4)
    assert not any(name.startswith("image_encoder.encoder.") for name in got)


def _poisoned(rank: int, argv: list[str]) -> None:
    """Train; one element of one expert's gradient on rank 1 is a NaN, in the second step."""
    from mm_models.mcore import session, start

    plain = start.wrap

    def wrap(chunks, *rest):
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if rank == 1 and name.endswith("layers.2.mlp.experts.down_proj"):
                    parameter.register_hook(poison)
        return plain(chunks, *rest)

    def poison(grad):
        if session.current().position.step != 2:
            return grad
        grad = grad.clone()
        grad[0, 0, 0] = float("nan")
        return grad

    start.wrap = wrap
    train_synthetic(rank, argv, Synthetic(order=ORDER * 2))


@pytest.mark.parametrize("flags", [topology(ep=2), [*topology(ep=2), DISTRIBUTED]], ids=["plain", "distributed"])
def test_a_nan_in_one_expert_stops_all_ranks_alike(tmp_path, flags):
    """B22: only one rank holds the expert; every rank stops in that step and names it."""
    argv = tiny_flags(tmp_path, *flags, "--from-scratch", steps=3)
    with pytest.raises(CaseFailed) as caught:
        run(_poisoned, 2, argv, timeout=60)
    message = str(caught.value)
    assert message.count("NonFinite: step 2: loss") == 2, message
    assert message.count("Non-finite gradients on rank 1: text_decoder.decoder.layers.2.mlp.experts.down_proj.") == 2


# --- B67 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A model without experts, as model.json: no Hugging Face GLM-4.5V is one."""
    folder = tmp_path_factory.mktemp("dense")
    moe = ("num_moe_experts", "moe_ffn_hidden_size", "n_shared_experts", "moe_router_topk", "first_k_dense_replace")
    tiny_flags(folder, text_decoder={key: 0 if key.startswith("first") else None for key in moe})
    return folder


def trainer_says(argv: list[str], world: int) -> str:
    with pytest.raises(UserError) as caught:
        plan(parse(argv), world)
    return str(caught.value)


FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}


def flags_of(degrees: dict[str, int]) -> list[str]:
    return [word for name, size in degrees.items() for word in (FLAGS[name], str(size))] + (
        [SP] if degrees.get("tp", 1) > 1 else []
    )


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2, "ep": 2, "etp": 1},
        {"pp": 2, "ep": 2},
        {"tp": 2, "ep": 2},
        {"ep": 4},
        {"tp": 2, "ep": 4, "etp": 1},
        {"ep": 2, "etp": 2},
    ],
    ids=str,
)
def test_expert_ranks_re_slice_the_same_processes(tmp_path, degrees):
    """B67: EP is no further dimension: each of these runs on four processes."""
    layout = plan(parse([*tiny_flags(tmp_path, *flags_of(degrees), batch=4), "--from-scratch"]), 4).layout
    assert layout.world == 4 and layout.edp * layout.ep * layout.etp * layout.pp == 4


@pytest.mark.parametrize(
    ("degrees", "world", "words"),
    [
        ({"ep": 3}, 3, "num_moe_experts 8 does not divide by ep 3 (possible: 1, 2, 4, 8)"),
        ({"ep": 16}, 16, "num_moe_experts 8 does not divide by ep 16 (possible: 1, 2, 4, 8)"),
        ({"etp": 5}, 5, "moe_ffn_hidden_size 48 does not divide by etp 5"),
    ],
    ids=str,
)
def test_trainer_and_converter_refuse_the_same_with_the_same_words(hf, tmp_path, capsys, degrees, world, words):
    """B67: ep 3 and ep 16 of 8 experts, by the trainer at start, `mm-convert` and `mm-models init`: numbers and valid values."""
    assert words in trainer_says([*tiny_flags(tmp_path, *flags_of(degrees), batch=world), "--from-scratch"], world)
    short = [word for name, size in degrees.items() for word in (f"--{name}", str(size))]
    assert main(["hf_to_mm", "--hf", str(hf), "--out", str(tmp_path / "mm"), *short]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "mm").exists()
    assert models(["init", "--hf", str(hf), *short, "-o", str(tmp_path / "m.json")]) == 2
    assert words in capsys.readouterr().err


def test_processes_that_expert_ranks_do_not_divide(tmp_path):
    """B67: tp4·ep2 on four processes follows the rule ep·etp | tp·dp: refused with ETP = TP, valid with etp 1 or 2."""
    argv = [
        *tiny_flags(tmp_path, *flags_of({"tp": 4, "ep": 2}), batch=4, text_decoder={"num_query_groups": 4}),
        "--from-scratch",
    ]
    message = trainer_says(argv, 4)
    assert "ep·etp = 2·4 = 8 must divide tp·cp·dp = 4·1·1 = 4" in message and "lower ep or etp" in message
    assert plan(parse([*argv, "--expert-tensor-parallel-size", "2"]), 4).layout.edp == 1


def test_a_dense_model_has_no_expert_ranks(dense):
    """B67: EP over a model without experts is refused, and says so."""
    files = [
        "--mm-model",
        str(dense / "model.json"),
        "--mm-data",
        str(dense / "data.json"),
        "--micro-batch-size",
        "1",
        "--train-iters",
        "1",
        "--lr",
        "1",
        "--from-scratch",
    ]
    assert plan(parse(files), 2).layout.dp == 2
    assert "ep 2, etp 1 (tp 1), but the model has no experts. Drop --ep" in trainer_says(
        [*files, *flags_of({"ep": 2})], 2
    )
    assert json.loads((dense / "model.json").read_text())["text_decoder"]["num_moe_experts"] is None


def test_a_hugging_face_model_whose_experts_do_not_divide(tmp_path):
    """B67: six experts: ep 2 and 3 convert, 4 does not."""
    hf = hf_folder(tmp_path / "hf", n_routed_experts=6)
    to_mm(hf, tmp_path / "two", ep=2), to_mm(hf, tmp_path / "three", ep=3)
    with pytest.raises(UserError, match=r"num_moe_experts 6 does not divide by ep 4 \(possible: 1, 2, 3, 6\)"):
        to_mm(hf, tmp_path / "four", ep=4)
    edit_config(hf, lambda config: config["text_config"].update(n_routed_experts=8))
    with pytest.raises(UserError, match=r"missing: .*experts\.6\."):
        to_mm(hf, tmp_path / "eight")
