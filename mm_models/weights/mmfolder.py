"""Checkpoint folders of the Megatron target: names, publishing, and finding the right one.

    <dir>/latest_checkpointed_iteration.txt      "release" or the number
    <dir>/release/ or <dir>/iter_0000100/
        manifest.json
        mp_rank_TT[_PPP]/model_optim_rng.pt           everything but experts, by (tp, pp)
        expert_rank_TT[_PPP]_EEE/model_optim_rng.pt   experts, by (etp, pp, ep), when ep > 1 or etp != tp
        .../optim_dp000.pt                            optimizer state beside the weights it belongs to

Layer numbers in the files count from 0 inside each (stage, chunk), as in the field; everywhere else names are global.
A folder is written under a temporary name that nothing accepts, and renamed when its manifest is in it; the tracker
comes last. `resolve` never falls back: a path that holds no complete checkpoint is refused with what was found there.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import re
import shutil
from pathlib import Path

from mm_models.errors import UserError, nearest
from mm_models.layout import ModelSplit, ParallelLayout

TRACKER, MANIFEST = "latest_checkpointed_iteration.txt", "manifest.json"
MODEL_FILE, RELEASE = "model_optim_rng.pt", "release"
_LOCK = ".lock"
_LAYER = re.compile(r"^(image_encoder|text_decoder)(\..*\.layers\.)(\d+)(\..*)$")
_locks: dict[Path, int] = {}


# --- names --------------------------------------------------------------------------------------------------------


def iteration_name(iteration: int | None) -> str:
    """`iter_0000100`, or `release` for None."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def dense_dir(layout: ParallelLayout, *, tp: int, pp: int) -> str:
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if layout.pp > 1 else "")


def expert_dir(layout: ParallelLayout, *, etp: int, pp: int, ep: int) -> str:
    """Where a shard's experts are; the dense folder unless experts live on a grid of their own."""
    if not layout.separate_experts:
        return dense_dir(layout, tp=etp, pp=pp)
    return f"expert_rank_{etp:02d}" + (f"_{pp:03d}" if layout.pp > 1 else "") + f"_{ep:03d}"


def optimizer_file(dp: int) -> str:
    return f"optim_dp{dp:03d}.pt"


def container(layout: ParallelLayout, chunk: int) -> str:
    """The key of a chunk's tensors in a file: `model`, or `model0`, `model1`, ... under VPP."""
    return "model" if layout.vpp == 1 else f"model{chunk}"


def local_key(name: str, split: ModelSplit) -> str:
    """The name in the file of a global name: its layer counted from 0 inside its (stage, chunk)."""
    found = _LAYER.match(name)
    if not found:
        return name
    module = split.vision if found[1] == "image_encoder" else split.text
    return f"{found[1]}{found[2]}{module.locate(int(found[3]))[2]}{found[4]}"


def global_key(key: str, split: ModelSplit, *, stage: int, chunk: int) -> str:
    """The inverse of `local_key` for a file of (stage, chunk)."""
    found = _LAYER.match(key)
    if not found:
        return key
    module = split.vision if found[1] == "image_encoder" else split.text
    layers = module.layers(stage, chunk) if module else ()
    if int(found[3]) >= len(layers):
        raise UserError(
            f"tensor {key!r} on stage {stage}, chunk {chunk}: that stage holds {len(layers)} layers of {found[1]} ({split.describe()})."
        )
    return f"{found[1]}{found[2]}{layers[int(found[3])]}{found[4]}"


# --- finding ------------------------------------------------------------------------------------------------------


def iterations(path: Path) -> list[str]:
    """Names of the complete checkpoints in `path`: those with a manifest."""
    return sorted(child.name for child in path.iterdir() if _is_name(child.name) and (child / MANIFEST).is_file())


def resolve(path: str | Path, iteration: int | str | None = None) -> Path:
    """The folder of one complete checkpoint: the tracker's, or `iteration` ("release" or a number). Refused: anything else."""
    path = Path(path)
    if not path.exists():
        siblings = [child.name for child in path.parent.iterdir() if child.is_dir()] if path.parent.is_dir() else []
        close = nearest(path.name, siblings)
        raise UserError(f"{path}: no such folder." + (f" Did you mean {path.parent / close}?" if close else ""))
    if not path.is_dir():
        raise UserError(f"{path}: a file, expected a checkpoint folder (with {TRACKER}).")
    if (path / MANIFEST).is_file() and iteration is None:
        return path
    if iteration is None:
        if not (path / TRACKER).is_file():
            raise UserError(_no_tracker(path))
        text = (path / TRACKER).read_text().strip()
        if text != RELEASE and not text.isdecimal():
            raise UserError(f"{path / TRACKER}: says {text!r}, expected '{RELEASE}' or an iteration number.")
        iteration, said = text, f"{TRACKER} names it"
    else:
        said = "it was asked for"
    name = RELEASE if iteration == RELEASE else iteration_name(int(iteration))
    folder, complete = path / name, ", ".join(iterations(path)) or "none"
    if not folder.is_dir():
        raise UserError(f"{path}: {name} is not there, but {said}. Complete checkpoints here: {complete}.")
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder}: no {MANIFEST}, so it is not a complete checkpoint of this tool. Complete checkpoints here: {complete}. "
            f"For a folder of the field give its layout: mm-convert resplit --mm {path} --source-tp ... --model model.json --out ..."
        )
    return folder


def _no_tracker(path: Path) -> str:
    children = sorted(child.name for child in path.iterdir())
    if not children:
        return f"{path}: empty, expected a checkpoint folder (with {TRACKER})."
    if (path / "config.json").is_file():
        return f"{path}: a Hugging Face folder, expected a checkpoint folder of the Megatron target (with {TRACKER})."
    weights = [name for name in children if _is_name(name)]
    if weights:
        return (
            f"{path}: holds {', '.join(weights[:5])} but no {TRACKER}, so which one counts is not known. "
            "Name the iteration, or restore the tracker."
        )
    if any(name.startswith(("mp_rank_", "expert_rank_")) for name in children):
        return f"{path}: holds rank folders but no {MANIFEST}: an incomplete checkpoint, or one of the field; give the folder above it."
    inside = [name for name in children if (path / name / TRACKER).is_file()]
    hint = f" Did you mean {' or '.join(str(path / name) for name in inside[:3])}?" if inside else ""
    found = ", ".join(children[:5]) + (", ..." if len(children) > 5 else "")
    return f"{path}: no {TRACKER} there (found: {found}), so it is not a checkpoint folder.{hint}"


def _is_name(name: str) -> bool:
    return name == RELEASE or re.fullmatch(r"iter_\d{7,}", name) is not None


# --- writing ------------------------------------------------------------------------------------------------------


def begin(path: str | Path, iteration: int | None, *, overwrite: bool = True) -> Path:
    """A temporary folder for checkpoint `iteration` of `path`; left-overs of killed writers are removed.

    One process calls this and `publish`; others may write into the folder between. Refused: another process writing here
    now, and, without `overwrite`, a checkpoint that is already there.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if not overwrite and (path / iteration_name(iteration)).exists():
        raise UserError(f"{path / iteration_name(iteration)}: exists already. Give another folder, or --overwrite.")
    remove_stale(path)
    return reserve(path / iteration_name(iteration))


def reserve(final: Path) -> Path:
    """Make the temporary folder that will become `final`, and hold its lock."""
    tmp = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    tmp.mkdir(parents=True)
    lock = os.open(tmp / _LOCK, os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _locks[tmp] = lock
    return tmp


def remove_stale(path: Path, name: str = "*") -> list[Path]:
    """Remove temporary folders in `path` whose writer is gone; a living one is refused. Returns what was removed."""
    removed = []
    for tmp in sorted(path.glob(f"{name if name == '*' else glob.escape(name)}.tmp-*")):
        if not re.fullmatch(r".*\.tmp-\d+", tmp.name) or not tmp.is_dir():
            continue
        lock = os.open(tmp / _LOCK, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{tmp}: another process (pid {tmp.name.rpartition('-')[2]}) is writing there now. Wait for it, or choose another folder."
            ) from None
        finally:
            os.close(lock)
        shutil.rmtree(tmp)
        removed.append(tmp)
    return removed


def finish(tmp: Path) -> Path:
    """Rename a temporary folder to its final name, durably; what was there before is replaced."""
    final = tmp.with_name(re.sub(r"\.tmp-\d+$", "", tmp.name))
    lock = _locks.pop(tmp, None)
    (tmp / _LOCK).unlink(missing_ok=True)
    sync_folder(tmp)
    if final.exists() and _exchange(tmp, final):
        shutil.rmtree(tmp)  # now the old one
    else:
        if final.exists():
            shutil.rmtree(final)
        os.rename(tmp, final)
    sync_folder(final.parent)
    if lock is not None:
        os.close(lock)
    return final


def _exchange(one: Path, two: Path) -> bool:
    """Swap two folders in one step (Linux renameat2); False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(one), here, os.fsencode(two), exchange) == 0


def publish(tmp: Path) -> Path:
    """Give a finished temporary folder its name, and let the tracker name it. The manifest must be inside."""
    assert (tmp / MANIFEST).is_file(), f"{tmp}: publish without a manifest"
    final = finish(tmp)
    write_tracker(final.parent, final.name)
    return final


def abandon(tmp: Path) -> None:
    """Remove a temporary folder after a failure."""
    lock = _locks.pop(tmp, None)
    # The failure that led here is the one to report, and no loader accepts a leftover.
    shutil.rmtree(tmp, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def write_tracker(path: Path, name: str) -> None:
    """Atomically let the tracker of `path` name the checkpoint folder `name`."""
    text = RELEASE if name == RELEASE else str(int(name.removeprefix("iter_")))
    tmp = path / f".{TRACKER}.{os.getpid()}"
    with tmp.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path / TRACKER)
    sync_folder(path)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
