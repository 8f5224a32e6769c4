"""Encoded images: every kind that real data hold, and every fault, refused in bounded memory with its reason."""

import contextlib
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from train.exits import DataError, exit_code_of
from train.image_files import ImageError, read_image

RNG = np.random.default_rng(0)
PICTURE = Image.fromarray(RNG.integers(0, 256, (9, 14, 3), np.uint8))


def encoded(image, form="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width, height, *, depth=1, kind=0, rows=b"", extra=b""):
    """A PNG file by hand, so that its header may promise what its pixels do not keep."""
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    parts = (chunk(b"IHDR", header), extra, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def reason_of(data, **options):
    with pytest.raises(ImageError) as refused:
        read_image(data, **options)
    assert isinstance(refused.value, DataError) and exit_code_of(refused.value) == 3
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)
    return refused.value.reason


@pytest.mark.parametrize("form", ["PNG", "BMP"])
def test_lossless_files_give_their_pixels(form):
    image = read_image(encoded(PICTURE, form))
    assert image.mode == "RGB" and np.array_equal(np.asarray(image), np.asarray(PICTURE))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "RGB"])
def test_every_mode_of_png_becomes_rgb(mode):
    flat = Image.new("RGB", (3, 2), (255, 255, 255)).convert(mode)
    image = read_image(encoded(flat))
    assert (image.mode, image.size) == ("RGB", (3, 2))
    assert np.asarray(image).min() == 255


def test_transparent_pixels_lie_on_white_and_half_transparent_ones_are_mixed_with_it():
    image = Image.new("RGBA", (3, 1))
    image.putdata([(200, 0, 0, 0), (200, 0, 0, 255), (200, 0, 0, 128)])
    found = np.asarray(read_image(encoded(image)))[0]
    assert found[0].tolist() == [255, 255, 255] and found[1].tolist() == [200, 0, 0]
    assert np.abs(found[2].astype(int) - [227, 127, 127]).max() <= 1


def test_a_palette_with_transparent_entries_lies_on_white():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    for transparency in (1, b"\xff\x00"):
        found = np.asarray(read_image(encoded(image, transparency=transparency)))[0]
        assert found.tolist() == [[10, 20, 30], [255, 255, 255]]


def test_a_colour_declared_transparent_lies_on_white():
    image = Image.new("RGB", (2, 1), (10, 20, 30))
    image.putpixel((1, 0), (1, 2, 3))
    assert read_image(encoded(image, transparency=(1, 2, 3))).getpixel((1, 0)) == (255, 255, 255)


def test_16_bits_of_grey_are_scaled_not_cut():
    values = np.array([0, 1, 128, 129, 255, 32768, 65534, 65535], np.uint16)
    rows = b"\0" + values.astype(">u2").tobytes()
    found = np.asarray(read_image(png(len(values), 1, depth=16, rows=rows)))[0]
    assert (found == np.round(values[:, None] * 255.0 / 65535)).all()
    with_hole = png(len(values), 1, depth=16, rows=rows, extra=chunk(b"tRNS", struct.pack(">H", 32768)))
    found = np.asarray(read_image(with_hole))[0]
    assert found[5].tolist() == [255, 255, 255] and found[0].tolist() == [0, 0, 0]


def test_cmyk_photos_become_rgb():
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = np.asarray(read_image(encoded(image, "JPEG"))).reshape(-1, 3).mean(0)
    assert red[0] > 230 and red[1:].max() < 60


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_stand_as_their_exif_entry_says(form, orientation):
    upright = Image.new("L", (32, 16), 0)
    upright.paste(255, (0, 0, 16, 8))  # one bright corner and two different sides tell all eight apart
    stored = {
        1: lambda x: x, 2: np.fliplr, 3: lambda x: np.rot90(x, 2), 4: np.flipud, 5: np.transpose,
        6: np.rot90, 7: lambda x: np.rot90(x.T, 2), 8: lambda x: np.rot90(x, -1),
    }[orientation](np.asarray(upright))  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = read_image(encoded(Image.fromarray(np.ascontiguousarray(stored)), form, exif=exif))
    assert found.size == upright.size
    assert np.abs(np.asarray(found)[..., 0].astype(int) - np.asarray(upright)).max() < 40


@pytest.mark.parametrize("exif", [b"Exif\0\0MM", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0nonsense", b"\0" * 9])
def test_a_photo_with_a_broken_exif_entry_stays_as_it_is_stored(exif):
    assert read_image(encoded(PICTURE, "JPEG", exif=exif)).size == PICTURE.size


def test_an_orientation_that_does_not_exist_turns_nothing():
    exif = Image.Exif()
    exif[0x0112] = 77
    assert read_image(encoded(PICTURE, "JPEG", exif=exif)).size == PICTURE.size


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP"])
def test_truncated_files_are_refused_wherever_they_end(form):
    data = encoded(Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8)), form)
    for share in (0.02, 0.1, 0.5, 0.9):
        cut = data[: max(8, int(share * len(data)))]
        assert reason_of(cut) == "truncated or broken image"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty image"),
        (b"The hour hand points to three.", "no image of a known format"),
        (b"\x00" * 100, "no image of a known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of a known format"),
        (b"\x89PNG\r\n\x1a\n", "truncated or broken image"),
        (b"\x89PNG\r\n\x1a\nThis is text.", "truncated or broken image"),
        (b"\xff\xd8\xff", "truncated or broken image"),
        (b"BM", "truncated or broken image"),
        (b"GIF89a", "truncated or broken image"),
        (png(0, 5), "truncated or broken image"),
        (png(4, 4, depth=8, rows=b"\0\0"), "truncated or broken image"),
    ],
)
def test_what_is_no_picture_is_refused_with_its_reason(data, reason):
    assert reason_of(data) == reason


def test_bytes_that_were_changed_anywhere_raise_nothing_else():
    data = bytearray(encoded(PICTURE, "JPEG"))
    for place in range(0, len(data), 3):
        changed = bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        with contextlib.suppress(ImageError):
            assert read_image(changed, max_pixels=10_000).mode == "RGB"


def test_animations_are_refused_and_still_pictures_of_these_formats_are_not():
    frames = [Image.new("P", (4, 4), color) for color in (0, 1)]
    for frame in frames:
        frame.putpalette([255, 255, 255, 10, 20, 30])
    for form in ("GIF", "PNG"):
        assert reason_of(encoded(frames[0], form, save_all=True, append_images=frames[1:])) == "animated image"
        assert read_image(encoded(frames[1], form)).getpixel((0, 0)) == (10, 20, 30)


def test_of_a_phones_several_pictures_the_first_is_the_photo():
    other = Image.new("RGB", (5, 5))
    assert read_image(encoded(PICTURE, "MPO", save_all=True, append_images=[other])).size == PICTURE.size


def test_the_limit_counts_pixels_and_is_met_exactly():
    data = encoded(PICTURE)
    assert read_image(data, max_pixels=9 * 14).size == (14, 9)
    assert reason_of(data, max_pixels=9 * 14 - 1) == "too many pixels"


@pytest.mark.parametrize("side", [10_000, 2**31 - 1])
def test_bombs_are_refused_by_their_header_without_memory(side):
    """A whole file of 10^8 pixels in 12 kB, and a header that promises more than any memory holds."""
    rows = (b"\0" + b"\0" * 1250) * 10_000 if side == 10_000 else b""
    code = (
        "import resource, sys\n"
        "from train.image_files import ImageError, read_image\n"
        "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "data, before = sys.stdin.buffer.read(), most()\n"
        "try:\n    read_image(data)\n"
        "except ImageError as error:\n    print(error.reason, most() - before < 8 * 1024)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    data = png(side, side, rows=rows)
    done = subprocess.run(command, cwd=Path(__file__).parents[1], input=data, capture_output=True, timeout=60)
    assert done.stdout == b"too many pixels True\n", done.stderr
    assert len(data) < 20_000
