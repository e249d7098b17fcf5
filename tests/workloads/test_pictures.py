"""Pictures of every mode of Pillow are read without loss, scaled from their own range, or refused with the reason."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import fedfleet
from fedfleet.workloads.data.images import picture, pictures, what_is_lost

SIZE = (3, 4)  # height, width
WHERE = "picture 7 of x.parquet"


def noise(*shape: int, top: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(0, top, shape)


def saved(image: Any, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def read(image: Any, channels: int = 1, form: str = "PNG", **options: Any) -> np.ndarray:
    return picture(saved(image, form, **options), (channels, *SIZE), WHERE)


def refused(image: Any, words: str, channels: int = 1, form: str = "PNG", **options: Any) -> None:
    with pytest.raises(ValueError, match=f"{WHERE} has .*{words}.*; (save|lay) it ") as error:
        read(image, channels, form, **options)
    assert "\n" not in str(error.value)


GREY = noise(*SIZE).astype(np.uint8)
COLOURS = noise(*SIZE, 3).astype(np.uint8)
DEEP = noise(*SIZE, top=65536).astype(np.uint16)


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_keep_their_bits(channels):
    assert np.array_equal(read(Image.fromarray(GREY), channels), np.repeat(GREY[None], channels, 0))
    colours = read(Image.fromarray(COLOURS), channels)
    expected = COLOURS if channels == 3 else np.asarray(Image.fromarray(COLOURS).convert("L"))[:, :, None]
    assert np.array_equal(colours, expected.transpose(2, 0, 1))
    assert colours.dtype == np.uint8


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_from_their_own_range(channels, form):
    found = read(Image.fromarray(DEEP), channels, form)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.repeat((DEEP.astype(np.float32) / 65535)[None], channels, 0))
    black_and_white = read(Image.fromarray(np.array([[0, 65535] * 2] * 3, np.uint16)))
    assert np.array_equal(black_and_white, [[[0, 1, 0, 1]] * 3])


def test_the_order_of_bytes_does_not_matter():
    raw = DEEP.astype(">u2").tobytes()
    image = Image.frombytes("I;16B", (SIZE[1], SIZE[0]), raw)
    assert np.array_equal(read(image, form="TIFF"), DEEP[None].astype(np.float32) / 65535)


def test_one_bit_is_black_or_white():
    assert np.array_equal(read(Image.fromarray(GREY > 127)), np.where(GREY > 127, 255, 0)[None])


def test_a_palette_is_its_colours():
    image = Image.fromarray(COLOURS).quantize(7)
    assert np.array_equal(read(image, 3), np.asarray(image.convert("RGB")).transpose(2, 0, 1))


@pytest.mark.parametrize("alpha", [255, 254, 0])
def test_alpha_is_dropped_only_where_all_is_opaque(alpha):
    channel = np.full((*SIZE, 1), 255, np.uint8)
    channel[1, 2] = alpha
    for pixels, mode, channels in ((COLOURS, "RGBA", 3), (GREY[:, :, None], "LA", 1)):
        image = Image.fromarray(np.concatenate([pixels, channel], 2), mode)
        if alpha == 255:
            assert np.array_equal(read(image, channels), pixels.transpose(2, 0, 1))
        else:
            refused(image, rf"transparent pixels \(mode {mode}\)", channels)


def test_a_colour_that_stands_for_transparency():
    palette = Image.fromarray(COLOURS).quantize(7)
    used = int(np.asarray(palette)[0, 0])
    refused(palette, r"transparent pixels \(mode P\)", 3, transparency=used)
    assert np.array_equal(read(palette, 3, transparency=200), np.asarray(palette.convert("RGB")).transpose(2, 0, 1))
    refused(Image.fromarray(GREY), r"transparent pixels \(mode L\)", transparency=int(GREY[0, 0]))
    absent = next(value for value in range(256) if value not in GREY)
    assert np.array_equal(read(Image.fromarray(GREY), transparency=absent), GREY[None])
    refused(Image.fromarray(COLOURS), r"transparent pixels \(mode RGB\)", 3, transparency=tuple(COLOURS[0, 0].tolist()))
    refused(Image.fromarray(DEEP), r"transparent pixels \(mode I;16\)", transparency=int(DEEP[0, 0]))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB", "F", "I"])
def test_modes_that_cannot_be_read_without_loss(mode):
    refused(Image.new(mode, (SIZE[1], SIZE[0])), f"the mode {mode}", 3, "TIFF")


def test_every_mode_of_pillow_is_read_or_refused():
    """Whatever file it comes from."""
    read_without_loss = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "I;16", "I;16L", "I;16B", "I;16N"}
    modes = {"1", "L", "P", "I", "F", "LA", "PA", "La", "RGB", "RGBX", "RGBA", "RGBa", "CMYK", "YCbCr", "LAB", "HSV"}
    for mode in modes | {"I;16", "I;16L", "I;16B", "I;16N"}:
        image = opaque(mode)
        assert (what_is_lost(image) == "") == (mode in read_without_loss), mode


def opaque(mode: str) -> Any:
    """A picture of a mode, as if it came from a file, without a transparent pixel."""
    image: Any = Image.new(mode, (2, 2))
    if mode in ("LA", "PA", "RGBA"):
        image.putalpha(255)
    image.tile = []
    return image


def sixteen_bits_of_rgb() -> bytes:
    """A PNG with three channels of 16 bits, which Pillow cannot write."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = noise(*SIZE, 3, top=65536).astype(">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", SIZE[1], SIZE[0], 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def test_channels_of_sixteen_bits_are_not_cut():
    with pytest.raises(ValueError, match=r"picture 7 of x\.parquet has 16 bits in each channel of the mode RGB; save"):
        picture(sixteen_bits_of_rgb(), (3, *SIZE), WHERE)


def test_pictures_of_a_column_have_the_same_depth():
    eight, sixteen = saved(Image.fromarray(GREY)), saved(Image.fromarray(DEEP))
    assert pictures([sixteen, sixteen], (1, *SIZE), "x.parquet").dtype == np.float32
    with pytest.raises(ValueError, match=r"picture 11 of x\.parquet must have as many bits as picture 10, 8 or 16"):
        pictures([eight, sixteen], (1, *SIZE), "x.parquet", 10)
    assert pictures([], (1, *SIZE), "x.parquet").shape == (0, 1, *SIZE)


def test_two_classes_that_differ_in_brightness_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFLEET_CACHE", str(tmp_path / "cache"))
    random, encoded = np.random.default_rng(0), []
    for row in range(60):
        low, high = ((2000, 20000), (40000, 65000))[row % 2]
        encoded.append(saved(Image.fromarray(random.integers(low, high, (8, 8)).astype(np.uint16))))
    (tmp_path / "x").mkdir()
    parquet.write_table(pa.table({"image": encoded, "y": np.arange(60) % 2}), tmp_path / "x" / "train.parquet")
    rows = {"input": "image", "label": "y", "test_fraction": 0.2}
    workload = {"name": "table", "path": str(tmp_path / "x"), **rows, "partition": "iid"}
    result = fedfleet.run(
        fedfleet.Experiment(
            workload={**workload, "model": {"name": "mlp", "hidden": [8]}},
            method={"name": "fedavg", "rule": {"name": "sgd", "lr": 0.1}},
            federation={"clients": 5, "cohort": 3, "rounds": 30},  # pyright: ignore[reportArgumentType]
            engine={"backend": "local"},  # pyright: ignore[reportArgumentType]
            tracking={"uri": "none"},  # pyright: ignore[reportArgumentType]
        )
    )
    assert result.metrics["eval/auc"] == 1.0
