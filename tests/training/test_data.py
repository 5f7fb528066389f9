"""Data: digits, CIFAR's files, folders of images, and the share of each rank."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from fastvit.training import datasets, loaders
from fastvit.training.config import Config, ConfigError
from fastvit.training.image_folder import IMAGENET_MEAN_STD, ImageFolder, _random_crop_box


def make_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_digits_are_those_of_scikit_learn_split_by_the_seed():
    from sklearn.datasets import load_digits

    expected = load_digits()
    for seed in (0, 1):
        data = datasets.load_digits(seed)
        assert (len(data.train.labels), len(data.test.labels), data.shape) == (1438, 359, (1, 8, 8))
        images = torch.cat([data.test.images, data.train.images])
        labels = torch.cat([data.test.labels, data.train.labels])
        order = torch.randperm(len(images), generator=make_generator(seed))
        assert torch.equal((images[:, 0] + 1) * 8, torch.tensor(expected.images[order], dtype=torch.float32))
        assert torch.equal(labels, torch.tensor(expected.target[order]))


def test_digits_move_by_at_most_a_pixel():
    images = torch.full((200, 2, 5, 6), -1.0)
    images[:, 0, 2, 3] = 1.0
    images[:, 1, 0, 0] = 0.5
    moved = datasets.load_digits(0).train.augment(images, generator=make_generator())
    assert moved.shape == images.shape and moved.is_contiguous()
    position = (moved[:, 0] == 1).flatten(1).int().argmax(1)
    positions = {(r, c) for r, c in zip((position // 6).tolist(), (position % 6).tolist(), strict=True)}
    assert positions == {(r, c) for r in (1, 2, 3) for c in (2, 3, 4)}
    assert (moved[:, 0] == 1).flatten(1).sum(1).eq(1).all()
    # The corner pixel leaves the image or stays in its corner; what comes in is background.
    assert set(moved[:, 1].unique().tolist()) == {-1.0, 0.5}
    assert torch.equal(datasets.random_shift(images, 0, make_generator()), images)


def test_random_flip_mirrors_half_of_the_images():
    images = torch.arange(3.0).expand(400, 1, 2, 3)
    flipped = datasets.random_flip(images, make_generator())[:, 0, 0, 0] == 2
    assert 150 < flipped.sum() < 250
    kept = datasets.random_flip(images, make_generator())[~flipped]
    assert torch.equal(kept, images[~flipped])


# CIFAR


def make_cifar(folder, name, protocol=2):
    """The files of one data set with few images; returns folder, pixels and labels by file, and names."""
    inner, train, test, key, names_file, names_key = datasets.CIFAR_FILES[name]
    random, contents, target = np.random.default_rng(0), {}, folder / inner
    names = [f"thing_{number}" for number in range(int(name[5:]))]
    target.mkdir(parents=True)
    for part in (*train, test):
        contents[part] = random.integers(0, 256, (6, 3072), dtype=np.uint8), random.integers(0, len(names), 6)
        content = {b"data": contents[part][0], key: contents[part][1].tolist(), b"batch_label": b"x"}
        (target / part).write_bytes(pickle.dumps(content, protocol=protocol))
    (target / names_file).write_bytes(pickle.dumps({names_key: [n.encode() for n in names]}, protocol=2))
    return target, contents, tuple(names)


@pytest.mark.parametrize(
    ("name", "protocol"), [("cifar100", 2), ("cifar10", 5)], ids=["cifar100", "cifar10 of another protocol"]
)
def test_cifar_files_are_read(tmp_path, name, protocol):
    folder, contents, names = make_cifar(tmp_path, name, protocol=protocol)
    _, train, test, *_ = datasets.CIFAR_FILES[name]
    for path in (folder, tmp_path):
        data = datasets.load_datasets(Config(data=name, data_path=str(path)))
        expected = np.concatenate([contents[part][0] for part in train]).reshape(-1, 3, 32, 32)
        assert np.array_equal(data.train.images.numpy(), expected)
        assert data.train.labels.tolist() == np.concatenate([contents[p][1] for p in train]).tolist()
        assert data.test.labels.tolist() == contents[test][1].tolist()
        assert (data.classes, data.shape) == (names, (3, 32, 32))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in datasets.CIFAR_MEAN_STD)
    plain = (data.test.images[[3, 1]] / 255 - mean) / std
    torch.testing.assert_close(data.test.read_batch([3, 1], None), plain, rtol=1e-5, atol=1e-5)
    one, again, other = (data.train.read_batch([0, 1, 2], make_generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)


class PrintsWhenUnpickled:
    def __reduce__(self):
        return (print, ("code from a file ran",))


def test_wrong_cifar_files_are_named(tmp_path, capsys):
    folder, _, _ = make_cifar(tmp_path, "cifar10")
    damaged = folder / "data_batch_2"
    wrong = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [3, 10]}
    expected = "must hold 3072 bytes and a label below 10 for each image"
    for content, message in (
        (pickle.dumps({b"data": PrintsWhenUnpickled()}), "builtins.print is not allowed in a file of CIFAR"),
        (damaged.read_bytes()[:500], "data_batch_2 is cut off or no file of CIFAR"),
        (pickle.dumps({b"data": 1, b"labels": []}), expected),
        (pickle.dumps(wrong, protocol=2), expected),
        (pickle.dumps(wrong | {b"labels": [3]}, protocol=2), expected),
    ):
        damaged.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            datasets.load_datasets(Config(data="cifar10", data_path=str(tmp_path)))
    assert "code from a file" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="must hold cifar-100-python for"):
        datasets.load_datasets(Config(data="cifar100", data_path=str(tmp_path)))
    damaged.unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_2"):
        datasets.load_datasets(Config(data="cifar10", data_path=str(tmp_path)))


# Folders


def save_image(path, pixels=None, format=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((9, 9, 3), np.uint8) if pixels is None else pixels).save(path, format)


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 3), ("test", 1)):
        for label, name in enumerate(("b", "a")):
            for index in range(count):
                pixels = np.zeros((20, 30 + index, 3), np.uint8)
                pixels[:, :, label] = 200  # class b is red, class a is green
                pixels[:, :15, 2] = 255  # and the left of each is blue
                save_image(tmp_path / split / name / "deep" / f"{index}.PNG", pixels)
            (tmp_path / split / name / "notes.txt").write_text("no image")
    return tmp_path


def load_folder(folder):
    return datasets.load_datasets(Config(data="folder", data_path=str(folder), image_size=10))


def denormalize(images):
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET_MEAN_STD)
    return images * std + mean


def test_an_image_folder_gives_classes_and_pixels(folder):
    data = load_folder(folder)
    assert data.classes == ("a", "b") and data.shape == (3, 10, 10)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1] and data.test.labels.tolist() == [0, 1]
    pixels = denormalize(data.test.read_batch([0, 1], None))
    assert pixels.shape == (2, 3, 10, 10)
    torch.testing.assert_close(pixels[:, :, 0, 9], torch.tensor([[0, 200, 0], [200, 0, 0]]) / 255)
    assert (pixels[:, 2, :, :4] > 0.99).all() and (pixels[:, 2, :, 6:] < 0.01).all()
    one, again, other = (data.train.read_batch([0, 5], make_generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    # Crops differ, and some are mirrored: blue is on the right.
    blue = torch.stack([data.train.read_batch([0], make_generator(seed))[0, 2] for seed in range(40)])
    right = (blue[:, :, 9] > blue[:, :, 0]).all(1)
    assert 0 < right.sum() < 40


def test_wrong_image_folders_are_named(folder):
    (folder / "train" / "c").mkdir()
    with pytest.raises(ConfigError, match="train/c has no images"):
        load_folder(folder)
    save_image(folder / "train" / "c" / "1.png")
    with pytest.raises(ConfigError, match="must hold the same classes; c are in one of them only"):
        load_folder(folder)
    (folder / "train" / "c").rename(folder / "train" / "a" / "c")
    (folder / "train" / "a" / "c" / "1.png").write_bytes(b"no image")
    with pytest.raises(OSError, match="cannot identify image file.*1.png"):
        load_folder(folder).train.read_batch([0], None)


def test_links_and_folders_named_like_images_are_followed(folder):
    train, elsewhere = folder / "train", folder / "elsewhere" / "c"
    save_image(elsewhere / "more.png" / "0.PGM", format="PPM")
    for link, target in (
        (train / "c", elsewhere),
        (folder / "test" / "c", elsewhere),
        (train / "a" / "more", elsewhere / "more.png"),
        (train / "a" / "up", train / "a"),
    ):
        link.symlink_to(target)
    data = load_folder(folder)
    assert data.classes == ("a", "b", "c")
    assert data.train.labels.tolist() == [0] * 4 + [1] * 3 + [2]
    assert data.train.read_batch(list(range(8)), None).shape == (8, 3, 10, 10)


def test_hidden_files_and_folders_of_storage_systems_are_left_out_and_counted(folder):
    train, test = folder / "train", folder / "test"
    for path in (
        train / "@eaDir" / "a" / "SYNOPHOTO_THUMB_XL.jpg",
        train / "a" / "@eaDir" / "0.PNG" / "SYNOPHOTO_THUMB_M.jpg",
        train / "b" / "deep" / "@eaDir" / "0.jpg",
        test / "#recycle" / "0.png",
        test / "a" / ".thumbnails" / "0.png",
        test / "__MACOSX" / "a" / "0.png",
        test / "b" / "._0.png",
    ):
        save_image(path)
    data = load_folder(folder)
    assert data.classes == ("a", "b") and (len(data.train.labels), len(data.test.labels)) == (6, 2)
    assert data.ignored == ("1 x #recycle", "1 x ._0.png", "1 x .thumbnails", "3 x @eaDir", "1 x __MACOSX")


def test_training_crops_have_all_areas_and_ratios():
    """Szegedy et al. draw areas from 8 % on, evenly, and widths from 3/4 to 4/3 of the heights."""
    generator = make_generator()
    boxes = torch.tensor([_random_crop_box(90, 60, generator) for _ in range(2000)], dtype=torch.float64)
    sizes = boxes[:, 2:] - boxes[:, :2]
    areas, ratios = sizes.prod(1) / (90 * 60), sizes[:, 0] / sizes[:, 1]
    assert boxes.min() >= 0 and (boxes[:, 2:].amax(0) <= torch.tensor([90, 60])).all()
    assert 0.08 <= areas.min() < 0.1 and 0.45 < areas.mean() < 0.54 and areas.max() > 0.85
    free = areas < 0.5  # larger boxes may be cut to the image
    assert (0.74 < ratios[free]).all() and ratios[free].min() < 0.76 and ratios[free].max() > 1.3
    assert 0.95 < ratios[free].median() < 1.05


GREY = np.arange(81).reshape(9, 9) * 3


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("x.png", "uint16"), ("x.tif", "uint16"), ("x.tif", ">u2"), ("x.pgm", "uint16")],
    ids=["png", "tif", "tif with the high byte first", "pgm"],
)
def test_images_of_16_bits_are_read_as_their_high_bytes(tmp_path, name, dtype):
    save_image(tmp_path / "a" / name, (GREY * 256).astype(dtype))
    save_image(tmp_path / "eight_bits" / "x.png", GREY.astype("uint8"))
    assert torch.equal(*ImageFolder(tmp_path, 9).read_batch([0, 1], None))


def test_an_image_of_32_bits_is_refused(tmp_path):
    for dtype in ("int32", "float32"):
        save_image(tmp_path / "a" / "x.tif", GREY.astype(dtype))
        message = "x.tif has numbers of 32 bits, .*; save the image with 8 or 16"
        with pytest.raises(ConfigError, match=message):
            ImageFolder(tmp_path, 9).read_batch([0], None)


def test_a_tiff_of_12_bits_is_read_as_its_high_bits(tmp_path):
    """PIL reads such files and does not write them, so the test changes the header of a file of 16 bits."""
    save_image(path := tmp_path / "a" / "x.tif", np.zeros((2, 2), np.uint16))
    # Two pixels are three bytes: 0xfff and 0x800.
    content = bytearray(path.read_bytes())
    entry = content.index((258).to_bytes(2, "little") + (3).to_bytes(2, "little"))
    content[entry + 8] = 12
    content[-8:] = b"\xff\xf8\x00" * 2 + bytes(2)
    path.write_bytes(content)
    with Image.open(path) as file:
        assert np.asarray(file).tolist() == [[0xFFF, 0x800]] * 2
    pixels = denormalize(ImageFolder(tmp_path, 2).read_batch([0], None))
    assert 0.5 < pixels.min() and pixels.max() > 0.95


# Shares of the ranks


def test_the_ranks_evaluate_every_test_image_once():
    for length, world in ((7, 2), (8, 3), (2, 4)):
        ranks_batches = [loaders.list_test_batches(length, 4, rank, world) for rank in range(world)]
        batches = [indices for rank_batches in ranks_batches for indices, _ in rank_batches]
        assert sorted(sum(batches, [])) == list(range(length)) and all(len(batch) <= 4 for batch in batches)


def test_training_batches_depend_on_epoch_rank_and_position_alone():
    def batches(epoch, rank, first=0):
        sampler = loaders.TrainBatchSampler(50, 6, rank, 2, seed=3)
        sampler.set_epoch(epoch, first)
        assert len(sampler) == 4
        return list(sampler)

    assert batches(1, 0) == batches(1, 0) != batches(2, 0)
    assert batches(1, 0)[2:] == batches(1, 0, first=2)
    images = [index for rank in (0, 1) for indices, _ in batches(1, rank) for index in indices]
    assert len(images) == len(set(images)) == 48
    seeds = {seed for epoch in (1, 2) for rank in (0, 1) for _, seed in batches(epoch, rank)}
    assert len(seeds) == 16
    with pytest.raises(ConfigError, match="--batch-size must be at most the 25 training images of one rank"):
        loaders.TrainBatchSampler(50, 26, 0, 2, 0)


def test_workers_do_not_change_the_batches():
    data = datasets.load_digits(0)
    seen = []
    for workers in (0, 2):
        sampler = loaders.TrainBatchSampler(len(data.train.labels), 300, 0, 1, seed=0)
        loader = loaders.make_loader(data.train, sampler, Config(workers=workers), torch.device("cpu"), 1)
        sampler.set_epoch(1)
        seen.append(list(loader))
    assert len(seen[0]) == 4
    for (images, labels), (others, names) in zip(*seen, strict=True):
        assert torch.equal(images, others) and torch.equal(labels, names)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_workers_of_folders_follow_the_cores_of_the_rank():
    images = datasets.load_digits(0).train
    for options, cores, expected in (
        ({}, 1, 1),
        ({}, 3, 3),
        ({}, 16, 4),
        ({"workers": 7}, 1, 7),
        ({"workers": 0}, 4, 0),
    ):
        config = Config(data="folder", data_path=".", **options)
        assert loaders.make_loader(images, [], config, torch.device("cpu"), cores).num_workers == expected
    assert loaders.make_loader(images, [], Config(), torch.device("cpu"), 4).num_workers == 0


def test_synthetic_images_can_be_told_apart():
    config = Config(data="synthetic", classes=4, image_size=8, synthetic_images=64)
    data = datasets.load_datasets(config)
    assert data.shape == (3, 8, 8) and len(data.classes) == 4 and len(data.test.labels) == 16
    again = datasets.load_datasets(config).train.read_batch([9], None)
    assert torch.equal(data.train.read_batch([5, 9], None)[1:], again)
    images = data.test.read_batch(list(range(16)), None).flatten(1)
    nearest = (images @ data.train.patterns.flatten(1).T).argmax(1)
    assert (nearest == data.test.labels).float().mean() > 0.9
