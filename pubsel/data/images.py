"""Image files as arrays: read upright, with transparency laid on white, at one size and in grey or colour for all.

A user's files are read by these rules; those of a named set as they always were (`photograph`, `unread`), since their
records rest on it.
"""

import os
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.Image import DecompressionBombError
from torch import Tensor

from pubsel.data.arrow import Inside
from pubsel.data.convert import Shape, describe, to_shape
from pubsel.data.findings import ERROR, NOTE, WARNING, Finding
from pubsel.data.overlap import of_pixels
from pubsel.data.splits import Images, Unread, Unreadable
from pubsel.files import plain
from pubsel.messages import UsageError, UserError, limit, needs_extra
from pubsel.settings.keys import Read

DICOM = {".dcm", ".dicom", ".ima"}
MARK, MARKED = 128, b"DICM"  # the place of a DICOM file's mark, and the mark
IMAGE_SUFFIXES = ".png .jpg .jpeg .jpe .jfif .bmp .gif .tif .tiff .webp .pbm .pgm .ppm .pnm".split()
SUFFIXES = {*IMAGE_SUFFIXES, *DICOM}
MOST_PIXELS = Image.MAX_IMAGE_PIXELS or 0  # Pillow refuses twice as many
SIXTEEN = {"I;16", "I;16L", "I;16B", "I;16N"}  # grey, 16 bits
GREY = {"1", "L", "LA", *SIXTEEN}
SEVERAL = {"GIF", "TIFF", "WEBP"}  # formats that may have several pages or frames
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, DecompressionBombError, struct.error, zlib.error, BadZipFile)
CORRUPT = (*DAMAGE, TypeError, KeyError, IndexError, OverflowError)  # the last three of tags that contradict each other
DIM = 16  # the largest value of an image that is nearly black: a sixteenth of the range
MOST = 0.9  # share of the images, or rows of a table, that decides about all: no single one does
EXPECTED = 64  # images whose heads are read first
SIDES = (32, 64, 128, 256)  # of images of several sizes, before a backbone scales them
RANGES = 16  # values of more than 8 bits that span less than one of them are probably of fewer bits
ORIENTATION = 0x0112  # of EXIF
TURNED = (5, 6, 7, 8)  # orientations that exchange height and width
BITS_PER_SAMPLE, WHITE_OR_BLACK = 258, 262  # tags of TIFF; of the second, 0: the lowest value is white
WIDE, VALUES, FRAMES = "pubsel_wide", "pubsel_values", "pubsel_frames"  # what `dicom` and `_image` add to an image


class Head(NamedTuple):
    """Beginning of an image file."""

    size: tuple[int, int]  # height and width, upright
    grey: bool
    frames: int
    wide: bool  # in colour with 16 bits a channel, of which Pillow reads 8


class Span(NamedTuple):
    """The lowest and the highest value of an image, and how many bits a value has as it is stored."""

    low: int
    high: int
    bits: int = 16


def _head_of(path: Path | Inside, image: Image.Image) -> Head:
    """Return the head of an opened image, before it is decoded. Unreadable for more than 16 bits per channel."""
    check_bits(image.mode, path)
    height, width = image.height, image.width
    # Pillow turns a TIFF itself, and would decode a PNG to search for its orientation
    tagged = image.format != "PNG" or {"exif", "XML:com.adobe.xmp"} & image.info.keys()
    if image.format != "TIFF" and tagged and image.getexif().get(ORIENTATION) in TURNED:
        height, width = width, height
    frames = getattr(image, "n_frames", 1) if image.format in SEVERAL else image.info.get(FRAMES, 1)
    return Head((height, width), _is_grey(image), frames, WIDE in image.info)


def _is_grey(image: Image.Image) -> bool:
    """Return whether an image has no colour; with a palette or transparency, whether its channels are equal."""
    if image.mode in ("P", "PA") and (palette := image.getpalette()):
        colours = np.asarray(palette).reshape(-1, 3)
        return bool((colours == colours[:, :1]).all())
    if image.mode == "RGBA":
        pixels = np.asarray(image)
        return bool((pixels[..., :3] == pixels[..., :1]).all())
    return image.mode in GREY


def alike(source: Path, paths: Sequence[Path | Inside], read: Read, shape: Shape | None = None) -> Images:
    """Return a user's images at one size, grey or in colour: as nine tenths of them are, unless `read` says otherwise.

    Without one size, the side of all is the smallest of SIDES that nine tenths of the short sides do not exceed: a
    backbone scales them again. Size and colour are treated as public. shape: that is expected of them; None: the shape
    of a few that are spread over the list, so that each of the others is opened once. UserError if none of the paths is
    an image.
    """
    if shape is None:
        some = list(filter(None, map(_head, paths[:: max(1, len(paths) // EXPECTED)])))
        shape, _ = _shape_of(source, some, read) if some else ((3, SIDES[0], SIDES[0]), ())

    # Each image is hashed as it was decoded: the same image may be there at another size.
    heads, spans, flat, dark = dict[int, Head](), dict[int, Span](), set[str](), set[str]()

    def image(i: int) -> tuple[Tensor, int | None]:
        with _image(paths[i], read.bits) as opened:
            head = _head_of(paths[i], opened)
            decoded, span = pixels_of(opened, read.bits)
        heads[i] = head
        if span:
            spans[i] = span
        if decoded.min() == decoded.max():
            flat.add(paths[i].name)
        elif decoded.max() <= DIM:
            dark.add(paths[i].name)
        before = decoded.transpose(2, 0, 1)  # [1 or 3, height, width]
        x = to_shape(torch.from_numpy(np.ascontiguousarray(before))[None], shape)[0]
        before = before[:1] if (before == before[:1]).all() else before  # the same image, however it is stored
        return x, of_pixels(before) if before.shape != shape else None

    def again() -> Images | None:
        if not heads:
            raise UserError(f"{source}: none of its {len(paths)} images can be read, the first {paths[0]}")
        of_all, _ = _shape_of(source, [*heads.values()], read)
        return None if of_all == shape else alike(source, paths, read, of_all)

    def findings() -> tuple[Finding, ...]:
        ordered = [heads[i] for i in sorted(heads)]
        result = [*_shape_of(source, ordered, read)[1], *_of_heads(source, ordered, shape)]
        if flat:
            text = f"{source.name}: {len(flat)} images have a single value, such as all black: {min(flat)}"
            result.append(Finding("black", WARNING, text))
        dim = nearly_black(source.name, len(dark), len(paths))
        return (*result, *dim, *_of_values(source, list(spans.values()), read.bits))

    return Images(shape, image, findings, again)


def _head(path: Path | Inside) -> Head | None:
    try:
        with _image(path) as image:
            return _head_of(path, image)
    except Unreadable:
        return None


def _shape_of(source: Path, heads: Sequence[Head], read: Read) -> tuple[Shape, tuple[Finding, ...]]:
    """Return the shape that nine tenths of some images give to all, and the finding that they have none."""
    channels = read.channels or (1 if sum(head.grey for head in heads) >= MOST * len(heads) else 3)
    (height, width), findings = _size(source, Counter(head.size for head in heads), read)
    return (channels, height, width), findings


def _size(source: Path, sizes: Counter[tuple[int, int]], read: Read) -> tuple[tuple[int, int], tuple[Finding, ...]]:
    """Return the height and width of all images, and the finding that they have no size in common."""
    if read.size is not None:
        return (read.size, read.size), ()
    (usual, count), n = sizes.most_common(1)[0], sizes.total()
    if count >= MOST * n:
        return usual, ()

    short = sorted(min(size) for size in sizes.elements())
    enough = short[int(np.ceil(MOST * n)) - 1]
    side = next((side for side in SIDES if side >= enough), SIDES[-1])
    text = f"{source.name}: its images have {len(sizes)} sizes, and {count} of {n} are {usual[0]}x{usual[1]}"
    return (side, side), (Finding("no_size", NOTE, text),)


def _of_heads(source: Path, heads: Sequence[Head], shape: Shape) -> Iterable[Finding]:
    """Yield the findings on sizes, colour and frames."""
    sizes, n = Counter(head.size for head in heads), len(heads)
    other = n - sizes[shape[1:]]
    if other:
        text = f"{source.name}: {other} of {n} images of {len(sizes)} sizes brought to {describe(shape)}"
        yield Finding("sizes", WARNING, f"{text}, scaled to cover and cut at the centre")
    grey = sum(head.grey for head in heads)
    if 0 < grey < n:
        read = "grey" if shape[0] == 1 else "colour"
        yield Finding(
            "colour", WARNING, f"{source.name}: {grey} images are grey and {n - grey} in colour: read in {read}"
        )
    if several := sum(head.frames > 1 for head in heads):
        text = f"{source.name}: {several} files have several pages or frames, of which the first is read"
        yield Finding("frames", WARNING, text)
    if wide := sum(head.wide for head in heads):
        text = f"{source.name}: {wide} colour images have 16 bits a channel, of which the 8 high ones are read"
        yield Finding("bits", ERROR, text, "if they use fewer, convert them to 8 bits")


def _of_values(source: Path, spans: Sequence[Span], bits: int | None) -> Iterable[Finding]:
    """Yield the findings on the values of images of more than 8 bits. bits: that their owner says they have."""
    counts = [max(span.high, ~span.low).bit_length() for span in spans]  # without sign
    most = max([8, *counts])
    most += most % 2  # as sensors have them: 10, 12 or 14
    if bits is None and (text := narrow(spans)):
        yield Finding("bits", ERROR, f"{source.name}: {text}", f"set bits={most}, as many as their values have")
    if beyond := sum(count > (bits or 16) for count in counts):
        text = f"{source.name}: {beyond} of {len(spans)} images have values of more than {bits} bits, which are cut off"
        yield Finding("bits", WARNING, text, f"if they count, set bits={most}")


def nearly_black(name: str, dark: int, n: int) -> tuple[Finding, ...]:
    """Return a finding if nine tenths of n images have no value over DIM."""
    text = f"{name}: {dark} images have no value over {DIM}, of 0 to 255"
    return (Finding("black", WARNING, text, "multiply them, so that the largest is 255"),) if dark >= MOST * n else ()


def narrow(spans: Sequence[Span]) -> str:
    """Return the words on images most of which use little of the range of their bits; "" if they do not."""
    few = sum(span.high - span.low < 2**span.bits / RANGES for span in spans)
    kinds = " or ".join(f"{kind}-bit" for kind in sorted({span.bits for span in spans}))
    text = f"{few} of {len(spans)} {kinds} images use less than a sixteenth of the range"
    return text if spans and few >= MOST * len(spans) else ""


def upright(path: Path | Inside, bits: int | None = None) -> tuple[np.ndarray, Span | None]:
    """Return a user's image file as uint8 [height, width, 1 or 3], upright and on white, and of 16-bit values the
    lowest and the highest. bits: of such a value; None: 16. Unreadable if it is absent or no image."""
    with _image(path, bits) as image:
        check_bits(image.mode, path)
        return pixels_of(image, bits)


def pixels_of(image: Image.Image, bits: int | None = None) -> tuple[np.ndarray, Span | None]:
    """Return an image as `upright` does."""
    spans, white_is_zero = image.info.get(VALUES), _tag(image, WHITE_OR_BLACK) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's words about tags that contradict each other
        image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN:
        values = np.asarray(image)
        spans = Span(int(values.min()), int(values.max()))
        image = eight_bits(image, bits)
        image = ImageOps.invert(image) if white_is_zero else image  # Pillow does so for 8 bits alone

    # what shows through is white
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image).convert("RGB")
        pixels = np.asarray(image)
        grey = bool((pixels == pixels[..., :1]).all())
    else:
        grey = _is_grey(image)
    decoded = np.array(image.convert("L" if grey else "RGB"))
    return decoded.reshape(*decoded.shape[:2], -1), spans


def _tag(image: Image.Image, tag: int) -> Any:
    """Return the value of a tag of a TIFF; None if there is none."""
    return getattr(image, "tag_v2", {}).get(tag)


def unread(paths: Sequence[Path | zipfile.Path], y: Tensor, shape: Shape, groups: Sequence[str] = ()) -> Unread:
    """Return image files with their labels and people, each read only when it is needed, scaled to cover and cut at the
    centre. UserError names a file that is absent or no image."""
    names = tuple("/".join(str(path).split("/")[-2:]) for path in paths)

    def image(i: int) -> Tensor:
        with _image(paths[i]) as opened:
            return fitted(opened, shape)

    return Unread(image, y, names, tuple(groups))


def eight_bits(image: Image.Image, bits: int | None = None) -> Image.Image:
    """Return an image with 8 bits per channel: of 16, the full range 0 to 65535 becomes 0 to 255, rounded; with `bits`,
    the range that these have."""
    if image.mode not in SIXTEEN:
        return image
    values = np.asarray(image).astype(np.uint32)
    if bits is None:
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))  # 257 is odd: no value lies between two
    most = 2**bits - 1
    return Image.fromarray(((values.clip(0, most) * 255 + most // 2) // most).astype(np.uint8))


def fitted(image: Image.Image, shape: Shape) -> Tensor:
    """Return one image as uint8 `shape`: Pillow's conversion to grey is the ITU-R 601 luma."""
    image = eight_bits(image)
    pixels = np.array(image.convert("L" if shape[0] == 1 else "RGB"))  # [h, w] or [h, w, 3]
    x = torch.from_numpy(pixels).reshape(*pixels.shape[:2], shape[0]).permute(2, 0, 1)
    return to_shape(x[None], shape)[0]


def photograph(path: Path) -> np.ndarray:
    """Return an image file of a named set at its own size, uint8 [height, width, 3]. UserError as in `unread`, and for
    more than 16 bits per channel."""
    with _image(path) as image:
        check_bits(image.mode, path)
        return fitted(image, (3, image.height, image.width)).permute(1, 2, 0).numpy()


def check_bits(mode: str, what: object) -> None:
    """Raise Unreadable, naming `what`, for Pillow's modes of more than 16 bits per channel."""
    if mode.startswith(("I", "F")) and mode not in SIXTEEN:
        why = "more than 16 bits per channel"
        raise Unreadable(what, Path(str(what)).name, why, "convert it to 8 or 16 bits first")


@contextmanager
def _image(path: Path | zipfile.Path | Inside, bits: int | None = None) -> Iterator[Image.Image]:
    """Open an image file, which is not decoded yet. bits: as in `dicom`. Unreadable for whatever is wrong with it."""
    try:
        if isinstance(path, Path):
            plain(path)
        with path.open("rb") as file:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # lines about a large image, or tags that contradict each other
                image = dicom(file, bits) if is_dicom(path) else Image.open(file)
                if image.format == "PPM" and image.mode == "I":  # 16 bits, as Pillow reads a PGM
                    image = Image.fromarray(np.asarray(image).astype(np.uint16))
            # how Pillow decodes a PNG, and the highest value of a PPM; its pieces of a TIFF do not always say
            how, bits_of = str([tile.args for tile in getattr(image, "tile", ())[:1]]), _tag(image, BITS_PER_SAMPLE)
            wide = {"PNG": ";16" in how, "PPM": "65535" in how, "TIFF": 16 in np.ravel(bits_of)}
            if wide.get(image.format or "") and image.mode not in SIXTEEN:
                image.info[WIDE] = True
            with image:
                yield image
    except CORRUPT as error:
        of_archive = isinstance(error, KeyError) and isinstance(path, zipfile.Path)
        raise _explained(path, FileNotFoundError() if of_archive else error) from None


def is_dicom(path: Path | zipfile.Path | Inside) -> bool:
    """Return whether a file is DICOM: by its suffix, or of a file without one, or with a number as in 1.2.840, by its
    mark. No pipe is opened."""
    suffix = os.path.splitext(path.name)[1].lower()
    if suffix.strip(".") and not suffix[1:].isdecimal():
        return suffix in DICOM
    try:
        if not isinstance(path, Path) or not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(MARK + len(MARKED))[MARK:] == MARKED
    except OSError:  # the one who reads it tells why
        return False


def dicom(file: IO[bytes], bits: int | None = None) -> Image.Image:
    """Return a DICOM image as it is shown: rescaled, in its window (VOI LUT), MONOCHROME1 inverted, 8 bits; colours by
    its palette. bits: of a value in an image without a window; None: as many as are stored. Of several frames the
    first. UserError without pydicom, or without what decodes the file; ValueError if it is damaged."""
    pydicom = _pydicom(file.name)
    try:
        image = pydicom.dcmread(file)
        syntax = image.file_meta.get("TransferSyntaxUID")
        if syntax is not None and syntax.is_encapsulated and not pydicom.pixels.get_decoder(syntax).is_available:
            packages = "pip install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg"
            raise UserError(f"{file.name}: compressed as {syntax.name}, and no decoder is installed: {packages}")
        _drop_empty(image)
        frames, processing = int(image.get("NumberOfFrames", 1)), pydicom.pixels.processing
        pixels = image.pixel_array[0] if frames > 1 else image.pixel_array
        info: dict[str, Any] = {FRAMES: frames}
        if image.PhotometricInterpretation == "PALETTE COLOR":
            pixels = processing.apply_color_lut(pixels, image)
            return _with_info(pixels / (np.iinfo(pixels.dtype).max / 255), info)
        if image.get("SamplesPerPixel", 1) > 1:
            return _with_info(pixels / ((2.0 ** int(image.get("BitsStored", 8)) - 1) / 255), info)

        values = processing.apply_voi_lut(processing.apply_modality_lut(pixels, image), image).astype(np.float64)
        low, high = _black_and_white(image, bits)
        stored = int(image.get("BitsStored", 16))
        if stored > 8 and "WindowCenter" not in image and not LOOKED_UP & set(image.dir()):
            info[VALUES] = Span(int(pixels.min()), int(pixels.max()), stored)
        values = ((values - low) / (high - low)).clip(0, 1)
        if image.PhotometricInterpretation == "MONOCHROME1":
            values = 1 - values
    except UserError:
        raise
    except Exception as error:  # of many kinds, by what is damaged
        raise ValueError(str(error)) from None
    return _with_info(255 * values, info)


def _with_info(values: np.ndarray, info: dict[str, Any]) -> Image.Image:
    """Return values 0 to 255, [h, w] or [h, w, 3], as an image."""
    image = Image.fromarray(values.round().astype(np.uint8))
    image.info.update(info)
    return image


def _pydicom(name: str) -> Any:
    """Return pydicom. UserError if it is not installed; name: of the file that needs it."""
    try:
        import pydicom
        import pydicom.pixels.processing
    except ImportError:
        raise UserError(f"{name}: reading DICOM needs pydicom: {needs_extra('dicom')}") from None
    return pydicom


LOOKED_UP = {"VOILUTSequence", "ModalityLUTSequence"}  # tables of a DICOM image
WINDOW = ("WindowCenter", "WindowWidth")
OPTIONAL: list[tuple[str, ...]] = [(name,) for name in ("NumberOfFrames", "VOILUTFunction", *sorted(LOOKED_UP))]
OPTIONAL += [WINDOW, ("RescaleSlope", "RescaleIntercept")]  # which count only together


def _drop_empty(image: Any) -> None:
    """Delete elements of a DICOM image that have no value, as anonymisers leave them, and a window of no width."""
    least = 1 if image.get("VOILUTFunction") in (None, "", "LINEAR") else np.nextafter(0, 1)  # as DICOM has it
    for names in OPTIONAL:
        values = [image.get(name) for name in names]
        absent = any(value in (None, "", []) for value in values)
        if absent or (names == WINDOW and np.ravel(values[1])[0] < least):
            for name in filter(image.__contains__, names):
                delattr(image, name)


def _black_and_white(image: Any, bits: int | None) -> tuple[float, float]:
    """Return the values of a DICOM image, after its look-up tables, that are shown black and white: all that a table,
    or its stored bits, can give. Never its darkest and brightest pixel, which differ from image to image. bits: that
    values of an image without a window have."""
    for name in sorted(LOOKED_UP, reverse=True):
        if name in image:
            return 0.0, 2.0 ** int(image[name].value[0].LUTDescriptor[2]) - 1
    stored = int(image.get("BitsStored", 16))
    signed, window = int(image.get("PixelRepresentation", 0)) == 1, "WindowCenter" in image
    stored = min(stored, bits + signed) if bits and not window else stored  # `bits` are those of a value without sign
    low, high = (-(2.0 ** (stored - 1)), 2.0 ** (stored - 1) - 1) if signed else (0.0, 2.0**stored - 1)
    slope, intercept = float(image.get("RescaleSlope", 1)), float(image.get("RescaleIntercept", 0))
    ends = low * slope + intercept, high * slope + intercept
    return ends if window else (min(ends), max(ends))  # pydicom's window goes from the first end to the second


def dicom_tag(path: Path, tag: str) -> str:
    """Return the value of a tag in the head of a DICOM file, such as PatientID; empty if it has none. UsageError for an
    unknown tag, UserError as `head_of`."""
    pydicom = _pydicom(str(path))
    if pydicom.datadict.tag_for_keyword(tag) is None:
        raise UsageError(f"unit={tag}: DICOM has no such tag: take one such as PatientID")
    try:
        return str(pydicom.dcmread(plain(path), stop_before_pixels=True, specific_tags=[tag]).get(tag, ""))
    except (pydicom.errors.InvalidDicomError, *CORRUPT) as error:
        raise _explained(path, error) from None


def _explained(path: Path | zipfile.Path | Inside, error: Exception) -> UserError:
    """Return Unreadable; but if the system failed (Pillow's own errors have no number), the image may well be whole."""
    if isinstance(error, FileNotFoundError):
        return Unreadable(path, path.name, "no such image", "correct the path, or bring the file back")
    if isinstance(error, DecompressionBombError):
        many = f"more than {2 * MOST_PIXELS / 1e6:.0f} million pixels, maybe made to fill memory"
        return Unreadable(path, path.name, many)
    if isinstance(error, OSError) and error.errno is not None:
        return UserError(f"{path}: cannot be read: {limit(error) or error.strerror}")
    return Unreadable(path, path.name)
