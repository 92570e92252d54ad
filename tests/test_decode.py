"""Decoding against OpenCV's own libjpeg and Pillow-free formulas in NumPy."""

from itertools import pairwise

import cv2
import numpy as np
import pytest
import simplejpeg
import torch

from fastactrec import DecodeError, decode_flow, decode_frames
from fastactrec.data.decode import JpegError, read_gray, read_rgb

RNG = np.random.default_rng(1)


def smooth(height, width, channels):
    noise = RNG.integers(0, 256, (height, width, channels)).astype(np.float32)
    blurred = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 2), None, 0, 255, cv2.NORM_MINMAX)
    return blurred.reshape(height, width, channels).astype(np.uint8)


def gray_jpeg(height=37, width=51):
    return cv2.imencode(".jpg", smooth(height, width, 1), [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()


def rgb_jpeg(height=37, width=51):
    return cv2.imencode(".jpg", smooth(height, width, 3), [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()


def codes(jpeg):
    return cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_GRAYSCALE)


@pytest.fixture(scope="module")
def stack():
    return [gray_jpeg() for _ in range(6)]


def test_flow_is_the_documented_formula(stack):
    got = decode_flow(stack, bound_px=20.0)
    want = np.stack([codes(j) for j in stack]).astype(np.float64) * 40 / 255 - 20
    assert got.shape == (1, 6, 37, 51)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got[0].numpy(), want, rtol=0, atol=1e-6)  # half an ulp at 20


def test_zero_motion_has_code_128(stack):
    flat = simplejpeg.encode_jpeg(np.full((8, 8, 1), 128, np.uint8), quality=95, colorspace="GRAY")
    assert decode_flow([flat, flat])[0, 0, 0, 0].item() == pytest.approx(20 / 255)  # + 0.078 px


def test_crop_normalise_and_batch(stack):
    got = decode_flow([stack, stack[::-1]], bound_px=8, crop=(3, 5, 20, 30), mean=[0.5, -0.25], std=[2.0, 3.0])
    want = np.stack([[codes(j) for j in stack], [codes(j) for j in stack[::-1]]])[..., 3:23, 5:35]
    want = want.astype(np.float64) * 16 / 255 - 8
    want[:, 0::2] = (want[:, 0::2] - 0.5) / 2
    want[:, 1::2] = (want[:, 1::2] + 0.25) / 3
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-6)


def test_flip_equals_code_255_minus_code_exactly(stack):
    """Every code occurs: the flip of x is what decoding 255 - code gives, bit for bit; y is only mirrored."""
    ramp = np.arange(256, dtype=np.uint8).repeat(64).reshape(256, 8, 8)
    for code in range(0, 256, 5):
        x, inverse = (
            simplejpeg.encode_jpeg(np.ascontiguousarray(a[..., None]), quality=100, colorspace="GRAY")
            for a in (ramp[code], 255 - ramp[code])
        )
        flipped = decode_flow([x, x], flip=True, mean=0.3, std=1.7)
        assert torch.equal(flipped[0, 0], decode_flow([inverse, inverse], mean=0.3, std=1.7)[0, 0])
        assert torch.equal(flipped[0, 1], decode_flow([x, x], mean=0.3, std=1.7)[0, 1])
    plain, flipped = decode_flow(stack)[0], decode_flow(stack, flip=True)[0]
    assert torch.equal(flipped[1::2], plain[1::2].flip(-1))
    want = (255.0 - np.stack([codes(j) for j in stack[0::2]])[..., ::-1]) * 40 / 255 - 20
    np.testing.assert_allclose(flipped[0::2].numpy(), want, rtol=0, atol=1e-6)


def test_flip_mirrors_inside_the_crop(stack):
    whole = decode_flow(stack, flip=True)
    cut = decode_flow(stack, crop=(2, 4, 10, 12), flip=True)
    assert torch.equal(cut, whole[..., 2:12, 51 - 16 : 51 - 4])


def test_frames_values_flip_and_statistics():
    jpegs = [rgb_jpeg() for _ in range(3)]
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    got = decode_frames(jpegs, crop=(1, 2, 30, 40), flip=True, mean=mean, std=std)
    want = np.stack([cv2.imdecode(np.frombuffer(j, np.uint8), cv2.IMREAD_COLOR)[..., ::-1] for j in jpegs])
    want = (want[:, 1:31, 2:42][:, :, ::-1] / 255.0 - mean) / std
    assert got.shape == (3, 3, 30, 40)
    # OpenCV's bundled libjpeg-turbo and simplejpeg's agree within a level
    np.testing.assert_allclose(got.numpy(), want.transpose(0, 3, 1, 2), rtol=0, atol=1.01 / 255 / 0.224)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dtypes_are_the_exact_value_rounded_once(stack, dtype):
    exact = torch.from_numpy((np.stack([codes(j) for j in stack]) * 40.0 / 255 - 20 - 0.1) / 0.7)
    assert torch.equal(decode_flow(stack, mean=0.1, std=0.7, dtype=dtype)[0], exact.to(dtype))


@pytest.mark.parametrize("channels_last", [False, True])
def test_out_is_written_in_place_whatever_its_strides(stack, channels_last):
    out = torch.full((2, 6, 37, 51), -99.0)
    if channels_last:
        out = out.to(memory_format=torch.channels_last)
    pointer, strides = out.data_ptr(), out.stride()
    assert decode_flow([stack, stack], out=out) is out
    assert (out.data_ptr(), out.stride()) == (pointer, strides)
    assert torch.equal(out[1:], decode_flow(stack))


@pytest.mark.parametrize(("shape", "dtype"), [((1, 6, 37, 50), torch.float32), ((1, 6, 37, 51), torch.float16)])
def test_out_of_another_shape_or_dtype_is_refused(stack, shape, dtype):
    with pytest.raises(ValueError, match=r"out is .* needs torch.float32 \[1, 6, 37, 51\]"):
        decode_flow(stack, out=torch.empty(shape, dtype=dtype))


@pytest.mark.parametrize(
    "crop", [(-1, 0, 5, 5), (0, -1, 5, 5), (0, 0, 0, 5), (0, 0, 5, 0), (33, 0, 5, 5), (0, 47, 5, 5)]
)
def test_crops_outside_are_refused(stack, crop):
    with pytest.raises(ValueError, match="is not inside 51x37 pixels"):
        decode_flow(stack, crop=crop)


def test_bytes_like_inputs_are_equal(stack):
    want = decode_flow(stack)
    assert torch.equal(decode_flow([bytearray(j) for j in stack]), want)
    assert torch.equal(decode_flow([np.frombuffer(j, np.uint8) for j in stack]), want)
    joined = memoryview(b"".join(stack))
    ends = np.cumsum([0] + [len(j) for j in stack])
    parts = [joined[a:b] for a, b in pairwise(ends)]
    assert torch.equal(decode_flow(parts), want)


def test_wrong_requests(stack):
    with pytest.raises(ValueError, match="odd"):
        decode_flow(stack[:3])
    with pytest.raises(ValueError, match="equal numbers"):
        decode_flow([stack, stack[:2]])
    with pytest.raises(ValueError, match="equal numbers"):
        decode_flow([])
    with pytest.raises(ValueError, match="one list of JPEGs"):
        decode_frames([[rgb_jpeg()], [rgb_jpeg()]])
    with pytest.raises(ValueError, match="equal numbers"):
        decode_frames([])
    with pytest.raises(ValueError, match="std must be above 0"):
        decode_flow(stack, std=0)
    with pytest.raises(ValueError, match="bound_px"):
        decode_flow(stack, bound_px=0)
    with pytest.raises(ValueError, match="as many as divide 6 channels"):
        decode_flow(stack, mean=[0, 0, 0, 0])


@pytest.mark.parametrize("bad", [0, 3, 7])
def test_truncated_file_is_named_by_its_place(stack, bad):
    samples = [list(stack[:4]), list(stack[2:])]
    samples[bad // 4][bad % 4] = samples[bad // 4][bad % 4][:-40]
    with pytest.raises(DecodeError, match=f"JPEG {bad}: ") as caught:
        decode_flow(samples)
    assert isinstance(caught.value, JpegError)
    assert caught.value.index == bad


def test_another_size_in_the_request_is_named():
    with pytest.raises(DecodeError, match="JPEG 1: 24x16 pixels, the first has 51x37"):
        decode_flow([gray_jpeg(), gray_jpeg(16, 24)])


def test_flow_saved_as_colour_is_taken_by_its_luminance_and_other_colours_refused(shared_data):
    gray = smooth(32, 40, 1)
    colour = simplejpeg.encode_jpeg(gray.repeat(3, axis=2), quality=95)
    assert abs(read_gray(colour).astype(int) - gray[..., 0]).max() <= 12  # JPEG loss only
    with pytest.raises(DecodeError, match="a CMYK file"):
        read_gray((shared_data / "jpeg/plain/cmyk_pytorch.jpg").read_bytes())


def test_reference_pictures(shared_data):
    """Odd sizes, sampling, restarts, progressive, 16-bit tables, CMYK against ImageMagick's PNGs."""
    warned = {"extraneous-data", "mjpeg", "progressive-missing-dc", "jpg-size-6x6"}  # or no JPEG at all
    seen = 0
    for path in sorted((shared_data / "jpeg/reference").rglob("*.jpg")):
        if path.stem in warned:
            with pytest.raises(DecodeError):
                read_rgb(path.read_bytes())
        elif path.with_suffix(".png").exists():
            want = cv2.imread(str(path.with_suffix(".png")), cv2.IMREAD_UNCHANGED)
            want = want >> 8 if want.dtype == np.uint16 else want
            want = want[..., None] if want.ndim == 2 else want[..., 2::-1]
            # ImageMagick's chroma upsampling and CMYK conversion differ by up to 4 levels; gray is exact
            assert abs(read_rgb(path.read_bytes()).astype(int) - want).max() <= 4, path.name
            seen += 1
    assert seen >= 15


def test_damaged_files_raise_or_decode_whole_and_quickly(shared_data):
    raised = 0
    for path in sorted((shared_data / "jpeg/damaged").rglob("*.jpg")):
        data = path.read_bytes()
        for read in (read_gray, read_rgb):
            try:
                image = read(data)
            except DecodeError:
                raised += 1
            else:
                reference = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
                assert image.shape[:2] == reference.shape[:2], path.name
    assert raised >= 2 * 70


def test_a_header_that_claims_gigabytes_costs_none():
    data = bytearray(gray_jpeg())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xdc\xff\xdc"
    with pytest.raises(DecodeError, match="claims 65500x65500 pixels"):
        read_gray(bytes(data))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_result_goes_to_the_device(stack):
    want = decode_flow(stack)
    assert torch.equal(decode_flow(stack, device="cuda").cpu(), want)
    out = torch.empty(want.shape, device="cuda")
    assert decode_flow(stack, device="cuda", out=out) is out
    assert torch.equal(out.cpu(), want)


def test_a_file_cut_anywhere_raises(stack):
    for end in range(len(stack[0])):
        with pytest.raises(DecodeError):
            read_gray(stack[0][:end])


def test_changed_bytes_never_crash(stack):
    rng = np.random.default_rng(0)
    for jpeg, read, shape in ((stack[0], read_gray, (37, 51)), (rgb_jpeg(), read_rgb, (37, 51, 3))):
        for _ in range(300):
            data = np.frombuffer(jpeg, np.uint8).copy()
            data[rng.integers(len(data), size=rng.integers(1, 4))] = rng.integers(256)
            try:
                image = read(data.tobytes())
            except DecodeError:
                continue
            assert image.ndim == len(shape)
            assert image.dtype == np.uint8
