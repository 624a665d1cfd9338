"""Caltech-101 from archives in its shape: odd members, the cache, the split, and the real one."""

from __future__ import annotations

import fcntl
import io
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gradstream.data import Dataset, caltech101, image_cache
from gradstream.data.caltech import MEAN, STD
from gradstream.errors import ConfigError, DataError

FOLDER = "101_ObjectCategories"
COUNTS = {"BACKGROUND_Google": 3, "Faces": 10, "accordion": 4, "wrench": 1}

Numbers = np.ndarray[Any, Any]


def jpeg(level: int, mode: str = "RGB") -> bytes:
    colour = level if mode == "L" else (level, 0, 255 - level)
    file = io.BytesIO()
    Image.new(mode, (40, 30), colour).save(file, "JPEG", quality=95)
    return file.getvalue()


def members() -> dict[str, bytes]:
    """Faces/image_0003.jpg is grey, BACKGROUND_Google/tmp no image, the order not by number."""
    files = {
        f"{FOLDER}/{category}/image_{number:04}.jpg": jpeg(10 * number)
        for category, count in COUNTS.items()
        for number in range(count, 0, -1)
    }
    files[f"{FOLDER}/Faces/image_0003.jpg"] = jpeg(200, "L")
    files[f"{FOLDER}/BACKGROUND_Google/tmp"] = b"not an image"
    return files


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        folder = tarfile.TarInfo(FOLDER)
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data folder with a small archive of Caltech-101's shape."""
    write_tar(tmp_path / "data/caltech101/101_ObjectCategories.tar.gz", members())
    return tmp_path / "data"


def test_images_targets_and_manifest(root: Path, tmp_path: Path) -> None:
    data = caltech101(16, root=root, cache=tmp_path / "cache", test_fraction=0)
    typed: Dataset = data
    assert data.categories == ("Faces", "accordion", "wrench")
    assert (typed.num_samples, typed.num_test_samples) == (15, 0)
    batch = data.batch(np.arange(15))
    assert batch.inputs.shape == (15, 3, 16, 16)
    assert (batch.inputs.dtype, batch.targets.dtype) == (np.float32, np.int64)
    assert batch.targets.tolist() == [0] * 10 + [1] * 4 + [2]
    pixels = unscaled(batch.inputs)
    assert pixels[1].mean(axis=(1, 2)) == pytest.approx([20, 0, 235], abs=3)  # Faces/image_0002
    assert pixels[2].mean(axis=(1, 2)) == pytest.approx([200, 200, 200], abs=1)  # the grey one
    manifest = data.manifest
    assert manifest.counts == (10, 4, 1, 3)
    assert manifest.categories[-1] == "BACKGROUND_Google"
    assert manifest.skipped == ("BACKGROUND_Google/tmp",)
    archive = root / "caltech101/101_ObjectCategories.tar.gz"
    assert manifest.source_bytes == archive.stat().st_size
    assert manifest.source == archive.name


def unscaled(inputs: Numbers) -> Numbers:
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (MEAN, STD))
    pixels: Numbers = (inputs * std + mean) * 255
    return pixels


def test_flat_and_background(root: Path, tmp_path: Path) -> None:
    square = caltech101(8, root=root, cache=tmp_path, test_fraction=0)
    flat = caltech101(8, root=root, cache=tmp_path, test_fraction=0, flat=True, background=True)
    assert flat.categories == (*square.categories, "BACKGROUND_Google")
    assert flat.num_samples == square.num_samples + 3
    ids = np.array([3, 14, 0])
    np.testing.assert_array_equal(flat.batch(ids).inputs, square.batch(ids).inputs.reshape(3, -1))
    assert flat.batch(np.array([17])).targets.tolist() == [3]


def test_split_is_stratified_and_a_function_of_the_seed(root: Path, tmp_path: Path) -> None:
    def split(seed: int, background: bool = False) -> tuple[list[int], list[int], bytes]:
        data = caltech101(8, root=root, cache=tmp_path, test_fraction=0.25, seed=seed, background=background)
        test = data.test_batch(np.arange(data.num_test_samples))
        train = data.batch(np.arange(data.num_samples))
        first = test.inputs[test.targets < 3]
        return np.bincount(train.targets).tolist(), np.bincount(test.targets).tolist(), first.tobytes()

    train, test, held_out = split(0)
    assert (train, test) == ([8, 3, 1], [2, 1])  # the single wrench is left to train on
    assert split(0)[2] == held_out == split(0, background=True)[2]
    assert len({split(seed)[2] for seed in range(5)}) > 1


def test_found_in_every_place(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = root / "caltech101/101_ObjectCategories.tar.gz"
    extracted = tmp_path / "extracted"
    for name, content in members().items():
        (extracted / name).parent.mkdir(parents=True, exist_ok=True)
        (extracted / name).write_bytes(content)
    monkeypatch.setenv("GRADSTREAM_DATA", str(tmp_path / "nowhere"))  # an argument wins
    batches = []
    for place in (root, archive.parent, archive, extracted, extracted / FOLDER):
        data = caltech101(8, root=place, cache=tmp_path / "cache")
        batches.append(data.batch(np.arange(data.num_samples)).inputs.tobytes())
    unzipped = tmp_path / "elsewhere/caltech-101"
    unzipped.mkdir(parents=True)
    (unzipped / archive.name).hardlink_to(archive)
    monkeypatch.setenv("GRADSTREAM_DATA", str(unzipped.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    data = caltech101(8)
    batches.append(data.batch(np.arange(data.num_samples)).inputs.tobytes())
    assert len(set(batches)) == 1
    assert list((tmp_path / "xdg/gradstream").glob("caltech101-*-8px/images.npy"))


def test_absent_data_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"(?s)101_ObjectCategories.tar.gz.*data.caltech.edu.*CC BY 4.0") as e:
        caltech101(root=tmp_path)
    assert str(tmp_path) in str(e.value)
    monkeypatch.delenv("GRADSTREAM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"neither root= nor GRADSTREAM_DATA is given.*gradstream data get"):
        caltech101()


def test_the_cache_is_made_once(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock is per open file, so threads contend for it as processes do."""
    made = []
    make = image_cache._make

    def count(folder: Path, source: Path, size: int, last: str) -> None:
        made.append(folder)
        make(folder, source, size, last)

    monkeypatch.setattr(image_cache, "_make", count)
    with ThreadPoolExecutor(4) as threads:
        sets = list(threads.map(lambda _: caltech101(8, root=root, cache=tmp_path / "cache"), range(4)))
    assert len(made) == 1
    assert len({data.num_samples for data in sets}) == 1


def test_another_archive_gets_another_cache(root: Path, tmp_path: Path) -> None:
    before = caltech101(8, root=root, cache=tmp_path / "cache")
    files = members()
    files.pop(f"{FOLDER}/Faces/image_0001.jpg")
    write_tar(root / "caltech101/101_ObjectCategories.tar.gz", files)
    after = caltech101(8, root=root, cache=tmp_path / "cache", test_fraction=0)
    assert after.num_samples == 14
    assert before.batch(np.array([0])).num_samples == 1  # the old one still stands


def test_interrupted_making_leaves_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    decoded = image_cache._decoded

    def interrupt(data: bytes, size: int, where: str) -> image_cache.Bytes:
        if "wrench" in where:
            raise KeyboardInterrupt
        return decoded(data, size, where)

    monkeypatch.setattr(image_cache, "_decoded", interrupt)
    with pytest.raises(KeyboardInterrupt):
        caltech101(8, root=root, cache=cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    monkeypatch.undo()
    assert caltech101(8, root=root, cache=cache).num_samples > 0


def test_remains_of_a_killed_process_are_cleared(root: Path, tmp_path: Path) -> None:
    caltech101(8, root=root, cache=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").glob("*px")
    shutil.rmtree(folder)
    remains = folder.with_name(f".{folder.name}.abc")
    remains.mkdir()
    caltech101(8, root=root, cache=tmp_path / "cache")
    assert not remains.exists()


def test_waiting_for_another_process_has_an_end(root: Path, tmp_path: Path) -> None:
    caltech101(8, root=root, cache=tmp_path)
    (folder,) = tmp_path.glob("*px")
    shutil.rmtree(folder)
    archive = root / "caltech101/101_ObjectCategories.tar.gz"
    with open(tmp_path / f"{folder.name}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"has held .* for 0 s"):
            image_cache.open_cache(archive, size=8, home=tmp_path, name="caltech101", last="", wait_s=0)


def test_a_damaged_cache_is_named(root: Path, tmp_path: Path) -> None:
    caltech101(8, root=root, cache=tmp_path)
    (folder,) = tmp_path.glob("*px")
    (folder / "images.npy").write_bytes((folder / "images.npy").read_bytes()[:-100])
    with pytest.raises(DataError, match=r"is damaged .* delete it"):
        caltech101(8, root=root, cache=tmp_path)


def test_a_cache_that_cannot_be_written(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be written"):
        caltech101(8, root=root, cache=tmp_path / "file")


@pytest.mark.parametrize("name", ["../../outside.jpg", "/outside.jpg", f"{FOLDER}/../../x.jpg", "a\\b.jpg"])
def test_members_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / "101_ObjectCategories.tar.gz", {**members(), name: jpeg(1)})
    with pytest.raises(DataError, match="no plain file or folder inside the archive"):
        caltech101(8, root=tmp_path, cache=tmp_path / "cache")


def test_links_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "101_ObjectCategories.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(f"{FOLDER}/Faces/image_0001.jpg")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(member)
    with pytest.raises(DataError, match="no plain file"):
        caltech101(8, root=path, cache=tmp_path / "cache")


def test_a_member_that_would_fill_the_memory_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_cache, "MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match="expected at most 100; do not trust"):
        caltech101(8, root=root, cache=tmp_path / "cache")


def test_damaged_archives(root: Path, tmp_path: Path) -> None:
    archive = root / "caltech101/101_ObjectCategories.tar.gz"
    whole = archive.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"<html>not found</html>", b""):
        archive.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read"):
            caltech101(8, root=root, cache=tmp_path / "cache")
    write_tar(archive, {f"{FOLDER}/Faces/image_0001.jpg": b"not a jpeg"})
    with pytest.raises(DataError, match=r"Faces/image_0001.jpg cannot be decoded"):
        caltech101(8, root=root, cache=tmp_path / "cache")
    write_tar(archive, {f"{FOLDER}/readme.txt": b"nothing here"})
    with pytest.raises(DataError, match=r"expected files <category>/<image>.jpg, got \['readme.txt'\]"):
        caltech101(8, root=root, cache=tmp_path / "cache")


def test_errors(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected 8 to 512"):
        caltech101(4, root=root)
    with pytest.raises(ConfigError, match=r"test_fraction=1.*expected at least 0 and below 1"):
        caltech101(root=root, test_fraction=1)
    with pytest.raises(DataError, match="training samples of caltech101-8"):
        caltech101(8, root=root, cache=tmp_path).batch(np.array([99]))


def test_the_real_archive(data_root: Path, tmp_path: Path) -> None:
    if not (data_root / "caltech101").is_dir():
        pytest.skip(f"no Caltech-101 in {data_root}")
    data = caltech101(16, root=data_root, cache=tmp_path)
    assert sum(data.manifest.counts) == 9144
    assert dict(zip(data.manifest.categories, data.manifest.counts, strict=True))["BACKGROUND_Google"] == 467
    assert data.manifest.skipped == ("BACKGROUND_Google/tmp",)
    assert len(data.categories) == 101
    assert (min(data.manifest.counts), max(data.manifest.counts)) == (31, 800)
    assert data.num_samples + data.num_test_samples == 8677
    inputs = data.batch(np.arange(0, data.num_samples, 7)).inputs
    assert abs(inputs.mean()) < 0.05
    assert 0.85 < inputs.std() < 1.05  # a little below 1: averaging evens out neighbours
