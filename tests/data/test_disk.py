"""A disk that is full: one error with file and setting, nothing left that a later run could take for a cache."""

from __future__ import annotations

import resource
import signal

import pytest

from mm_models.data.dataset import ChatDataset
from mm_models.errors import UserError
from tests.data import kit

ROWS = [kit.row(f"word {index} " * 60, "yes") for index in range(60)]


@pytest.fixture
def small_disk():
    """No file of this process can grow beyond so many bytes: the write fails as it does on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 30000], ids=["first byte", "later"])
@pytest.mark.parametrize("cached", [True, False], ids=["cache_dir", "temporary"])
def test_a_full_disk(folder, processor, template, tmp_path, small_disk, cached, size):
    cache = tmp_path / "cache"
    config = kit.data_config(
        folder, tmp_path, ROWS, preprocessing_batch_size=10, cache_dir=str(cache) if cached else None
    )
    whole = ChatDataset(kit.data_config(folder, tmp_path, preprocessing_batch_size=10), processor, template)
    small_disk(size)
    with pytest.raises(
        UserError, match=r"samples cannot be written to .* \(.*File too large.*basic_parameters.cache_dir"
    ):
        ChatDataset(config, processor, template)
    if cached:
        assert [path.suffix for path in cache.iterdir()] == [".lock"]
        small_disk(resource.RLIM_INFINITY)
        assert list(ChatDataset(config, processor, template)) == list(whole)


def test_no_room_for_the_list_of_a_cache(folder, processor, template, tmp_path, monkeypatch):
    """The samples fit, what is written after them does not."""

    def full(*_):
        raise OSError(28, "No space left on device")

    config = kit.data_config(folder, tmp_path, ROWS, cache_dir=str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr("mm_models.data.cache.os.replace", full)
        with pytest.raises(UserError, match=r"samples cannot be written to .*cache \(No space left on device\)"):
            ChatDataset(config, processor, template)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(ChatDataset(config, processor, template)) == len(ROWS)
