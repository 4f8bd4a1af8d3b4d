"""Images: the pixels Hugging Face's `load_image` gives, or a fault with a kind; never another picture (B49, B58)."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from mm_models.data import images
from mm_models.data.images import ImageBytes, ImageFault
from mm_models.errors import UserError
from tests.data import kit

PICTURE = kit.pattern(60, 40, 3)


def encoded(image, form, *, frames=1, **options):
    more = [kit.pattern(60, 40, seed) for seed in range(1, frames)]
    file = io.BytesIO()
    image.copy().save(file, form, **options, **({"save_all": True, "append_images": more} if more else {}))
    return file.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[images.ORIENTATION_TAG] = orientation
    return tags


def deep_png(color, channels):
    """A PNG of 16 bits per channel, which PIL cannot write."""
    values = np.random.default_rng(1).integers(0, 65536, (5, 7, channels)).astype(">u2")
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 7, 5, 16, color, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(b"\0" + line.tobytes() for line in values))),
        (b"IEND", b""),
    ]
    body = b"".join(struct.pack(">I", len(x)) + t + x + struct.pack(">I", zlib.crc32(t + x)) for t, x in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


GREY = PICTURE.convert("L")
ALPHA = Image.merge("RGBA", (*PICTURE.split(), GREY))
KINDS = {
    "1": encoded(PICTURE.convert("1"), "PNG"),
    "1 bmp": encoded(PICTURE.convert("1"), "BMP"),
    "L": encoded(GREY, "PNG"),
    "L jpeg": encoded(GREY, "JPEG"),
    "LA": encoded(Image.merge("LA", (GREY, GREY)), "PNG"),
    "P": encoded(PICTURE.convert("P"), "PNG"),
    "P one clear colour": encoded(PICTURE.convert("P"), "PNG", transparency=3),
    "P clear by degrees": encoded(PICTURE.convert("P"), "PNG", transparency=bytes(range(256))),
    "P gif": encoded(PICTURE.convert("P"), "GIF", transparency=2),
    "RGB a clear colour": encoded(PICTURE, "PNG", transparency=PICTURE.getpixel((0, 0))),
    "RGBA": encoded(ALPHA, "PNG"),
    "RGBA webp": encoded(ALPHA, "WEBP"),
    "CMYK jpeg": encoded(PICTURE.convert("CMYK"), "JPEG"),
    "CMYK tiff": encoded(PICTURE.convert("CMYK"), "TIFF"),
    "LAB": encoded(Image.merge("LAB", PICTURE.split()), "TIFF"),
    "YCbCr": encoded(PICTURE.convert("YCbCr"), "TIFF"),
    "jpeg": encoded(PICTURE, "JPEG"),
    "progressive jpeg": encoded(PICTURE, "JPEG", progressive=True),
    "webp": encoded(PICTURE, "WEBP"),
    "tiff": encoded(PICTURE, "TIFF"),
    "ppm": encoded(PICTURE, "PPM"),
    "two views of a phone": encoded(PICTURE, "MPO", frames=2),
    "two views, turned": encoded(PICTURE, "MPO", exif=exif(6), frames=2),
    "16-bit RGB": deep_png(2, 3),
    "16-bit RGBA": deep_png(6, 4),
    "one pixel": encoded(kit.pattern(1, 1), "PNG"),
    "a line": encoded(kit.pattern(1, 200), "PNG"),
    **{f"jpeg turned {turn}": encoded(PICTURE, "JPEG", exif=exif(turn)) for turn in range(1, 9)},
    "png turned": encoded(PICTURE, "PNG", exif=exif(8)),
    "webp turned": encoded(PICTURE, "WEBP", exif=exif(5)),
    "an orientation that is none": encoded(PICTURE, "JPEG", exif=exif(9)),
}
ANIMATED = {
    "gif": encoded(PICTURE, "GIF", frames=2),
    "png": encoded(PICTURE, "PNG", frames=2),
    "webp": encoded(PICTURE, "WEBP", frames=2),
    "tiff": encoded(PICTURE, "TIFF", frames=2),
}
DEEP = {
    "16-bit grey": encoded(Image.fromarray(np.full((40, 60), 300, np.uint16)), "PNG"),
    "16-bit grey tiff": encoded(Image.fromarray(np.full((40, 60), 300, np.uint16)), "TIFF"),
    "32-bit grey": encoded(Image.new("I", (60, 40), 300), "TIFF"),
    "float grey": encoded(Image.new("F", (60, 40), 0.5), "TIFF"),
}


def hugging_face(data):
    from transformers.image_utils import load_image

    return load_image(Image.open(io.BytesIO(data)))


def fault(source, **options):
    with pytest.raises(ImageFault) as caught:
        images.inspect(source, **{"decode": True} | options)
    return caught.value


def same(data, **options):
    """From a file's bytes: size before decoding, after it, and pixels, as Hugging Face loads them."""
    source, expected = ImageBytes(data=data), hugging_face(data)
    sizes = {images.inspect(source, decode=decode, **options) for decode in (True, False)}
    found = images.load_rgb(source)
    return (
        sizes == {(expected.height, expected.width)} and found.mode == "RGB" and found.tobytes() == expected.tobytes()
    )


class TestPixels:
    @pytest.mark.parametrize("kind", KINDS)
    def test_they_are_hugging_faces(self, kind):
        assert same(KINDS[kind])

    def test_a_file_is_its_bytes(self, tmp_path):
        (tmp_path / "a.png").write_bytes(KINDS["png turned"])
        expected = hugging_face(KINDS["png turned"])
        assert images.load_rgb(tmp_path / "a.png").tobytes() == expected.tobytes()
        assert images.inspect(tmp_path / "a.png", decode=True) == (expected.height, expected.width)

    @pytest.mark.parametrize("kind", ANIMATED)
    def test_the_first_frame_when_asked_for(self, kind):
        assert "2 frames" in str(fault(ImageBytes(data=ANIMATED[kind])))
        assert fault(ImageBytes(data=ANIMATED[kind]), decode=False).kind == "animated image"
        assert same(ANIMATED[kind], first_frame=True)

    @pytest.mark.parametrize("kind", DEEP)
    def test_depth_is_never_clipped(self, kind):
        assert fault(ImageBytes(data=DEEP[kind])).kind == "deep image"
        assert fault(ImageBytes(data=DEEP[kind]), first_frame=True, decode=False).kind == "deep image"


class TestFaults:
    def test_missing(self, tmp_path):
        assert "no such file" in str(fault(tmp_path / "a.png"))
        assert "a folder, not a file" in str(fault(tmp_path))
        long = fault(tmp_path / ("a" * 5000))
        assert len(str(long)) < 700 and "too long" in str(long)
        assert {fault(path).kind for path in (tmp_path / "a", tmp_path, tmp_path / "a\0b")} == {"missing image"}

    @pytest.mark.parametrize("data", [b"", b"no", b"\x89PNG\r\n\x1a\n", b"GIF89a", KINDS["png turned"][:40]])
    def test_not_an_image(self, data):
        found = fault(ImageBytes(data=data))
        assert found.kind == "broken image" and f"image 'bytes, {len(data)} bytes': not a readable image" in str(found)

    @pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF"])
    def test_truncated(self, form):
        data = encoded(Image.effect_noise((200, 200), 80).convert("RGB"), form)
        assert fault(ImageBytes(data=data[: len(data) // 2])).kind == "broken image"

    def test_it_survives_a_process(self):
        """A worker's error arrives with its kind."""
        again = pickle.loads(pickle.dumps(fault(ImageBytes(data=b""))))
        assert isinstance(again, ImageFault) and again.kind == "broken image" and "not a readable" in str(again)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["P gif", "RGBA", "CMYK jpeg", "progressive jpeg", "webp", "tiff", "png turned"])
    def test_what_passes_the_start_decodes_later(self, kind):
        """Damaged anywhere: a fault at the start, or Hugging Face's pixels."""
        data, draw = KINDS[kind], random.Random(kind)
        for _ in range(300):
            cut = bytearray(data[: draw.randint(0, len(data))] if draw.random() < 0.5 else data)
            for _ in range(draw.randint(0, 3)):
                if cut:
                    cut[draw.randrange(len(cut))] = draw.randrange(256)
            source = ImageBytes(data=bytes(cut))
            try:
                size = images.inspect(source, decode=True, first_frame=True)
            except ImageFault:
                continue
            found = images.load_rgb(source)
            assert (found.height, found.width) == size and found.tobytes() == hugging_face(bytes(cut)).tobytes()


class TestPaths:
    @pytest.mark.parametrize("form", ["relative", "absolute", "file", "spaces", "unicode", "parent"])
    def test_from_another_working_directory(self, tmp_path, monkeypatch, form):
        """B58."""
        name = {"spaces": "a b/c d.png", "unicode": "画像/é.png", "parent": "../up.png"}.get(form, "images/x.png")
        path = kit.picture(tmp_path / "data" / name)
        reference = {"absolute": str(path), "file": path.as_uri()}.get(form, name)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert images.resolve(reference, tmp_path / "data").samefile(path)

    def test_a_percent_encoded_file_address(self, tmp_path):
        path = kit.picture(tmp_path / "a b.png")
        assert images.resolve(path.as_uri(), ".").samefile(path) and "%20" in path.as_uri()

    def test_a_file_of_another_host(self, tmp_path):
        assert images.resolve("file://localhost/a/b.png", ".") == images.resolve("file:///a/b.png", ".")
        with pytest.raises(UserError, match=r"image 'file://a.png': got the host 'a.png', expected file:///path"):
            images.resolve("file://a.png", ".")

    @pytest.mark.parametrize("address", ["http://x/y.png", "HTTPS://x/y.png", "s3://x/y.png", "http://[x"])
    def test_addresses_are_refused(self, address):
        with pytest.raises(UserError, match=r"address, expected a path\. Download the file first"):
            images.resolve(address, ".")


@pytest.mark.parametrize("family", ["glm4v_moe", "glm4v", "qwen2_vl"])
@pytest.mark.parametrize(
    ("size", "bounds"),
    [
        ((1, 1), {}),
        ((1, 200), {}),
        ((200, 1), {"image_min_pixels": 0}),
        ((3, 599), {"image_max_pixels": 1568}),
        ((560, 560), {"image_max_pixels": 112 * 112}),
        ((56, 56), {"image_min_pixels": 224 * 224, "image_max_pixels": 448 * 448}),
    ],
)
def test_a_picture_has_the_tokens_of_its_pixels(examine, processors, tmp_path, family, size, bounds):
    """Extreme shapes, and the bounds of data.json (B49)."""
    kit.picture(tmp_path / "a.png", *size)
    sample = examine(kit.row("<image>", "b", images=["a.png"]), family=family, **bounds).sample
    images_of, token = processors(family, **bounds).image_processor, processors(family).image_token_id
    made = images_of(images=[images.load_rgb(sample.images[0])], return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [list(grid) for grid in sample.grids]
    assert len(made["pixel_values"]) == 4 * sample.ids.count(token)
    tokens = {(560, 560): 16, (56, 56): 64}
    assert sample.ids.count(token) == tokens.get(size, sample.ids.count(token))


@pytest.mark.parametrize("family", ["glm4v_moe", "qwen2_vl"])
def test_a_shape_the_processor_refuses(examine, tmp_path, family):
    kit.picture(tmp_path / "thin.png", 1, 5000)
    row = kit.row("<image>", "b", images=["thin.png"])
    found = examine(row, family=family).fault
    assert f"image '{tmp_path}/thin.png': 1 x 5000: absolute aspect ratio" in found
    assert examine(row, family=family, on_broken_image="drop").dropped == "extreme shape (on_broken_image)"
